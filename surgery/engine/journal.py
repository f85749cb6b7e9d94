"""The journal: which output tensors are safely on the disk, with their checksums, bound to one plan.

One file a worker, appended only after the tensors' bytes were flushed. A line that was cut short by a kill, or any
line that is not understood, counts as not written: its tensors are done again.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path

from surgery.errors import OutputError

JOURNAL_PREFIX = "journal."
BOUND_NAME = "plan"
DIGEST_NBYTES = 16


class Done:
    """Checksums by the number of the output tensor in the plan: 17 bytes a tensor."""

    def __init__(self, count: int) -> None:
        self._digests = bytearray(DIGEST_NBYTES * count)
        self._known = bytearray(count)

    def __contains__(self, ordinal: int) -> bool:
        return bool(self._known[ordinal])

    def __len__(self) -> int:
        return self._known.count(1)

    def set(self, ordinal: int, digest: bytes) -> None:
        self._digests[DIGEST_NBYTES * ordinal : DIGEST_NBYTES * (ordinal + 1)] = digest
        self._known[ordinal] = 1

    def hex(self, ordinal: int) -> str:
        return self._digests[DIGEST_NBYTES * ordinal : DIGEST_NBYTES * (ordinal + 1)].hex()

    def forget(self, ordinal: int) -> None:
        self._known[ordinal] = 0


class Journal:
    """Appends to one worker's journal file."""

    def __init__(self, directory: Path, worker: int, digest: str) -> None:
        self._path = directory / f"{JOURNAL_PREFIX}{worker}"
        # A newline first: whatever was cut short by a kill stays a line of its own.
        self._append(f"\n{json.dumps({'plan': digest})}\n")

    def record(self, entries: Iterable[tuple[int, bytes]]) -> None:
        """Note tensors whose bytes are already flushed; durable when this returns."""
        lines = "".join(f"{ordinal} {digest.hex()}\n" for ordinal, digest in entries)
        if lines:
            self._append(lines)

    def _append(self, text: str) -> None:
        descriptor = os.open(self._path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
        try:
            data = memoryview(text.encode())
            while data:
                data = data[os.write(descriptor, data) :]
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def read_journals(directory: Path, digest: str, count: int, finished: str = "") -> Done:
    """What earlier runs of the plan `digest` finished. Raises `OutputError` where another plan's work lies there.

    `finished` is the plan of the output that is at OUT: what a kill left of that run is no work.
    """
    done = Done(count)
    for path in sorted(directory.glob(f"{JOURNAL_PREFIX}*")):
        plan = None
        for line in path.read_text("utf-8", "replace").split("\n"):
            if line.startswith("{"):
                plan = _plan_of(line)
                continue
            number, _, hexadecimal = line.partition(" ")
            if plan is None or not number.isdecimal() or len(hexadecimal) != 2 * DIGEST_NBYTES:
                continue
            if plan == finished and plan != digest:
                continue
            if plan != digest:
                raise OutputError(
                    f"an unfinished run of another plan is there: plan {plan}, this one is {digest}",
                    str(directory),
                    f"finish it with the command it was started with, or remove {directory}",
                )
            if int(number) < count:
                try:
                    done.set(int(number), bytes.fromhex(hexadecimal))
                except ValueError:
                    continue
    return done


def is_bound(directory: Path, identity: str) -> bool:
    """Whether what lies in the staging directory was made by this plan from this state of the source.

    Files of another plan that finished nothing look alike and hold other bytes: they must not be built on.
    """
    try:
        return (directory / BOUND_NAME).read_text("utf-8") == identity
    except (OSError, UnicodeDecodeError):
        return False


def bind(directory: Path, identity: str) -> None:
    """Bind the staging directory, emptied before, to a plan and a state of the source."""
    marker = directory / BOUND_NAME
    aside = directory / f"{BOUND_NAME}.new"
    with aside.open("w") as file:
        file.write(identity)
        file.flush()
        os.fsync(file.fileno())
    aside.replace(marker)


def forget_journals(directory: Path) -> None:
    """Remove every worker's journal, and the binding they were made under."""
    for path in [*directory.glob(f"{JOURNAL_PREFIX}*"), directory / BOUND_NAME]:
        path.unlink(missing_ok=True)


def _plan_of(line: str) -> str | None:
    try:
        plan = json.loads(line)["plan"]
    except (ValueError, KeyError, TypeError):
        return None
    return plan if isinstance(plan, str) else None
