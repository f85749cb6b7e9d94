"""What tests of the command line share."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

CHECKOUT = Path(__file__).resolve().parent.parent


def run_surgery(
    *arguments: str | os.PathLike[str],
    env: dict[str, str] | None = None,
    timeout: float = 300,
    **options: Any,
) -> subprocess.CompletedProcess[str]:
    """Run `surgery ARGUMENTS` as its own process and return its exit code, stdout and stderr as text.

    `env` adds to the environment; other options go to `subprocess.run` (`cwd`, `input`, `preexec_fn`, ...).
    The exit code is the caller's to judge: nothing is raised for it.
    """
    if "input" not in options:
        options.setdefault("stdin", subprocess.DEVNULL)
    options.setdefault("stdout", subprocess.PIPE)
    options.setdefault("stderr", subprocess.PIPE)
    return subprocess.run(
        surgery_command(*arguments), env=surgery_environment(env), timeout=timeout, text=True, **options
    )


def surgery_command(*arguments: str | os.PathLike[str]) -> list[str]:
    """The argument list of `surgery ARGUMENTS`, for tests that start the process themselves (to kill it)."""
    return [sys.executable, "-m", "surgery", *(os.fspath(argument) for argument in arguments)]


def surgery_environment(env: dict[str, str] | None = None) -> dict[str, str]:
    """An environment in which `python -m surgery` is this checkout from any working directory."""
    paths = [str(CHECKOUT), os.environ.get("PYTHONPATH", "")]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, paths)), **(env or {})}
