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


def read_journals(directory: Path, digest: str, count: int) -> Done:
    """What earlier runs of the plan `digest` finished. Raises `OutputError` where the journal is another plan's."""
    done = Done(count)
    for path in sorted(directory.glob(f"{JOURNAL_PREFIX}*")):
        for line in path.read_text("utf-8", "replace").split("\n"):
            if line.startswith("{"):
                _refuse_other_plan(line, digest, directory)
                continue
            number, _, hexadecimal = line.partition(" ")
            if number.isdecimal() and int(number) < count and len(hexadecimal) == 2 * DIGEST_NBYTES:
                try:
                    done.set(int(number), bytes.fromhex(hexadecimal))
                except ValueError:
                    continue
    return done


def _refuse_other_plan(line: str, digest: str, directory: Path) -> None:
    try:
        found = json.loads(line)["plan"]
    except (ValueError, KeyError, TypeError):
        return
    if found != digest:
        raise OutputError(
            f"an unfinished run of another plan is there: plan {found}, this one is {digest}",
            str(directory),
            f"finish it with the plan and source it was made from, or remove {directory}",
        )
