"""What goes where: the answer and only that to stdout, all else to stderr."""

from __future__ import annotations

import contextlib
import sys
from typing import Any

from surgery.errors import OutputError, SurgeryError, printable


def emit(text: str) -> None:
    """The answer, to stdout. Names in it must have been made printable."""
    _write(text if text.endswith("\n") else text + "\n")


def _write(text: str) -> None:
    """To stdout. A reader that left is for `main` to judge; an answer that cannot be written is a failure."""
    try:
        sys.stdout.write(text)
    except BrokenPipeError:
        raise
    except OSError as error:
        raise OutputError(f"cannot write the answer: {error.strerror}", "stdout", "check where stdout goes") from error


def emit_json(document: Any) -> None:
    """One JSON document on stdout, keys in the order given."""
    import msgspec

    data = msgspec.json.format(msgspec.json.encode(document), indent=2)
    _write(data.decode() + "\n")


def message(text: str) -> None:
    """A remark to a person, on stderr; a reader that left must not end a job that writes."""
    try:
        sys.stderr.write(printable(text) + "\n")
        sys.stderr.flush()
    except OSError:
        return


def emit_error(error: SurgeryError, *, as_json: bool) -> None:
    """The three lines on stderr; with --json the document on stdout, so that a pipeline sees it too."""
    if as_json:
        with contextlib.suppress(OSError, OutputError):
            emit_json({"error": error.as_json()})
            sys.stdout.flush()
    with contextlib.suppress(OSError):
        sys.stderr.write("\n".join(error.lines()) + "\n")
