"""Threads that hash byte ranges of files and say which are not what they should be."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import msgspec

from surgery.verifying.rehash import BUFFER_NBYTES, Reader

_UNIT_NBYTES = 32 << 20
_UNIT_TENSORS = 256
_UNREAD = "!"


class Range(msgspec.Struct, frozen=True, gc=False):
    """The bytes of one tensor in its file, and the digest that they should have."""

    name: str
    offset: int
    nbytes: int
    digest: str


class Stopped(Exception):
    """Another thread failed, or the user interrupted."""


class HashingPool:
    """Ranges of one file that follow one another are one unit of work, taken in order by the next free thread.

    `judge(path, range, fault)` hears in the caller's thread of every range; `fault` is None where it is right.
    """

    def __init__(
        self,
        workers: int,
        judge: Callable[[Path, Range, str | None], None],
        advance: Callable[[int], None],
    ) -> None:
        self._workers = max(1, workers)
        self._judge = judge
        self._advance = advance
        self._path: Path | None = None
        self._unit: list[Range] = []
        self._unit_nbytes = 0
        self._running: deque[tuple[Path, list[Range], Future[list[str]]]] = deque()
        self._threads = ThreadPoolExecutor(self._workers, thread_name_prefix="surgery-verify")
        self._buffers = threading.local()
        self._stop = threading.Event()

    def __enter__(self) -> HashingPool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, trace: object) -> None:
        try:
            if kind is None:
                self._submit()
                while self._running:
                    self._take_result()
        finally:
            self._stop.set()
            self._threads.shutdown(cancel_futures=True)

    def add(self, path: Path, item: Range) -> None:
        if path != self._path or self._unit_nbytes >= _UNIT_NBYTES or len(self._unit) >= _UNIT_TENSORS:
            self._submit()
        self._path = path
        self._unit.append(item)
        self._unit_nbytes += item.nbytes

    def _submit(self) -> None:
        if not self._unit or self._path is None:
            return
        future = self._threads.submit(self._hash, self._path, self._unit)
        self._running.append((self._path, self._unit, future))
        self._unit, self._unit_nbytes = [], 0
        # A bound on what waits: a manifest of any length is read no faster than it is proven.
        while len(self._running) > 4 * self._workers:
            self._take_result()

    def _take_result(self) -> None:
        path, unit, future = self._running.popleft()
        for item, found in zip(unit, future.result(), strict=True):
            if found == item.digest:
                self._judge(path, item, None)
            elif found.startswith(_UNREAD):
                self._judge(path, item, f"its bytes cannot be read: {found[1:]}")
            else:
                self._judge(path, item, f"its bytes hash to {found}, the manifest says {item.digest}")

    def _hash(self, path: Path, unit: list[Range]) -> list[str]:
        """The digest of every range; where it cannot be read, the reason behind `_UNREAD`."""
        if not hasattr(self._buffers, "buffer"):
            self._buffers.buffer = memoryview(bytearray(BUFFER_NBYTES))
        found: list[str] = []
        try:
            with Reader(path, self._buffers.buffer, self._heard) as reader:
                for item in unit:
                    try:
                        found.append(reader.digest(item.offset, item.nbytes))
                    except OSError as error:
                        found.append(f"{_UNREAD}{error.strerror or error}")
        except OSError as error:
            found += [f"{_UNREAD}{error.strerror or error}"] * (len(unit) - len(found))
        return found

    def _heard(self, nbytes: int) -> None:
        if self._stop.is_set():
            raise Stopped
        self._advance(nbytes)
