"""Options that several commands share, and what they become."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import click

from surgery.errors import UsageError

Command = TypeVar("Command", bound=Callable[..., Any])

LAYOUTS = ("hf", "hf-rank", "dcp-hf", "vllm", "deepseek")


def _source_layout(*names: str) -> Callable[[Command], Command]:
    return click.option(
        *names,
        "source_layout",
        type=click.Choice(LAYOUTS),
        help="The layout of SRC where its files could be of several; told by what it holds, when left out.",
    )


SOURCE_OPTIONS = (
    click.option(
        "--on-duplicate",
        type=click.Choice(["refuse", "index", "last"]),
        default="refuse",
        show_default=True,
        help="A tensor in two files with other bytes: refuse, take the one the index names, or the last file's.",
    ),
    click.option(
        "--allow-outside-links",
        is_flag=True,
        help="Follow links that leave the source directory (the hub cache's own links are always followed).",
    ),
)
OPEN_OPTIONS = (*SOURCE_OPTIONS, _source_layout("--source-layout"))
"""Of commands that take rank files too."""

RESHARD_OPEN_OPTIONS = (*SOURCE_OPTIONS, _source_layout("--from", "--source-layout"))

WRITING_OPTIONS = (
    click.option("--dry-run", is_flag=True, help="Print the plan and write nothing."),
    click.option("--plan-out", type=click.Path(path_type=Path), help="Also write the plan to this file."),
    click.option("--json", "as_json", is_flag=True, help="A summary as one JSON document on stdout."),
    click.option("--workers", type=click.IntRange(1, 64), default=2, show_default=True, help="Threads that copy."),
    click.option("--memory", default="16MiB", show_default=True, help="Buffers for copying, all workers together."),
    click.option("--overwrite", is_flag=True, help="Replace an earlier output of surgery; nothing foreign is touched."),
    click.option(
        "--verify",
        "verify_mode",
        type=click.Choice(["headers", "readback"]),
        default="headers",
        show_default=True,
        help="Before publishing: read headers back, or every byte.",
    ),
)

OUTPUT_OPTIONS = (
    click.option(
        "--max-shard-size", metavar="SIZE", help="Tensor bytes a file: 5GB (10^9) or 5GiB (2^30). Default 5GB."
    ),
    click.option("--dummy", is_flag=True, help="Write config and assets only, for an engine's dummy loading."),
    click.option(
        "--set",
        "settings",
        multiple=True,
        metavar="KEY=VALUE",
        help="With --dummy: change a config field besides (a.b reaches into an object); recorded as lost fidelity.",
    ),
)


def add_options(options: tuple[Callable[[Command], Command], ...]) -> Callable[[Command], Command]:
    """A decorator that adds `options` in their order."""

    def decorate(command: Command) -> Command:
        for option in reversed(options):
            command = option(command)
        return command

    return decorate


def parse_pairs(pairs: tuple[str, ...], option: str, mend: str, form: str = "OLD=NEW") -> dict[str, str]:
    """`OLD=NEW` pairs as a map; `form` is their name. Raises `UsageError` for one without `=` or a repeated OLD."""
    found: dict[str, str] = {}
    for pair in pairs:
        old, equals, new = pair.partition("=")
        if not equals or not old:
            raise UsageError(f"{pair!r} is not {form}", option, mend)
        if old in found:
            raise UsageError(f"{old!r} is given twice", option, "give each once")
        found[old] = new
    return found
