"""Error kinds: what went wrong, where, how to mend it, and the exit code that says so.

Every class owns its exit code (design section 8), so that a shell script can tell a wrong command line (2) from
a broken source (3) and from an output that cannot be written (4). Exit 1 is no error: it is the answer "no".
"""

from __future__ import annotations

import unicodedata
from typing import Literal

import msgspec

Severity = Literal["fault", "note"]

MAX_LISTED_PROBLEMS = 20


def printable(text: str) -> str:
    """`text` with everything that a terminal would act on replaced by its escape.

    Names come from files that anybody may have made: control characters, format and bidirectional controls and
    lone surrogates (Unicode categories C*, line and paragraph separators) never reach a terminal raw.
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_escaped(character) for character in text)


def _escaped(character: str) -> str:
    if unicodedata.category(character)[0] != "C" and character not in "\u2028\u2029":
        return character
    return character.encode("unicode_escape", "surrogatepass").decode("ascii")


class SurgeryError(Exception):
    """A failure that a person can act on. `what` has the value found and the value expected."""

    exit_code = 70
    kind = "internal"

    def __init__(self, what: str, where: str = "", mend: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.mend = mend

    def __str__(self) -> str:
        return self.what if not self.where else f"{self.what} ({self.where})"

    def lines(self) -> list[str]:
        """The three lines a person sees: `error:`, `where:`, `mend:`. Listed problems indent under the first."""
        what = "\n".join(printable(line) for line in self.what.split("\n"))
        return [
            f"error: {what}",
            f"where: {printable(self.where) or '-'}",
            f"mend: {printable(self.mend) or '-'}",
        ]

    def as_json(self) -> dict[str, str | int]:
        return {
            "kind": self.kind,
            "what": self.what,
            "where": self.where,
            "mend": self.mend,
            "exit_code": self.exit_code,
        }


class UsageError(SurgeryError):
    """The command line, recipe or keep list cannot be understood."""

    exit_code = 2
    kind = "usage"


class CannotApply(SurgeryError):
    """The operation is well formed and cannot be done, truthfully, to this checkpoint."""

    exit_code = 2
    kind = "cannot-apply"


class SourceError(SurgeryError):
    """The source cannot be read or is not a valid checkpoint."""

    exit_code = 3
    kind = "source"


class OutputError(SurgeryError):
    """The output cannot be written: it exists, there is no space, another plan or another run holds it."""

    exit_code = 4
    kind = "output"


class Finding(msgspec.Struct, frozen=True):
    """One thing that a look at a checkpoint found.

    `fault`: its content is not what it says it is. `note`: worth knowing, nothing is wrong with the weights.
    """

    kind: str
    severity: Severity
    what: str
    where: str = ""
    mend: str = ""
    tensor: str | None = None


class Problems:
    """Collects every problem of one check, so that a person mends them all in one go."""

    def __init__(self) -> None:
        self._found: list[tuple[str, str, str]] = []

    def __len__(self) -> int:
        return len(self._found)

    def add(self, what: str, where: str = "", mend: str = "") -> None:
        self._found.append((what, where, mend))

    def raise_if_any(self, error: type[SurgeryError], headline: str = "") -> None:
        """Raise one `error` with the first 20 problems listed and the rest counted."""
        if not self._found:
            return
        what, where, mend = self._found[0]
        if len(self._found) == 1:
            raise error(what, where, mend)
        listed = [
            f"  {problem}" + (f" [{place}]" if place and place != where else "")
            for problem, place, _ in self._found[:MAX_LISTED_PROBLEMS]
        ]
        rest = len(self._found) - MAX_LISTED_PROBLEMS
        if rest > 0:
            listed.append(f"  and {rest} more")
        raise error("\n".join([headline or f"{len(self._found)} problems", *listed]), where, mend)
