"""Progress for people: a bar on a terminal, a line now and then in a log, nothing on stdout."""

from __future__ import annotations

import sys
import time
from typing import Any

from surgery.cli.output import message
from surgery.execute import Progress
from surgery.sizes import human_size

LOG_EVERY_SECONDS = 30.0
"""A line this often where stderr is no terminal: enough for a CI log to show that the job lives."""


class ConsoleProgress(Progress):
    """A tqdm bar on a terminal; elsewhere a line every 30 s."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._bar: Any = None
        self._total = self._done = 0
        self._next_line = 0.0
        self._started = 0.0

    def start(self, nbytes: int) -> None:
        self._total, self._started = nbytes, time.monotonic()
        self._next_line = self._started + LOG_EVERY_SECONDS
        if sys.stderr.isatty():
            # Imported here: it costs more than everything else that `--help` needs (facts, io.md section 4).
            from tqdm import tqdm

            self._bar = tqdm(total=nbytes, unit="B", unit_scale=True, desc=self._what, file=sys.stderr)

    def add(self, nbytes: int) -> None:
        self._done += nbytes
        if self._bar is not None:
            self._bar.update(nbytes)
        elif time.monotonic() >= self._next_line:
            self._next_line += LOG_EVERY_SECONDS
            seconds = time.monotonic() - self._started
            rate = human_size(int(self._done / seconds))
            message(
                f"{self._what}: {human_size(self._done)} of {human_size(self._total)} in {seconds:.0f} s ({rate}/s)"
            )

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
            self._bar = None
