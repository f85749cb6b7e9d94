"""Layer lists as people write them: `0,6,7`, `0-3` (both ends), a repeat copies the layer again."""

from __future__ import annotations

import re
from collections.abc import Sequence

from surgery.errors import UsageError

MAX_LISTED = 100_000
"""A longer list is a typing mistake: no model has so many layers, and `0-4000000000` must not fill memory."""


def parse_ranges(text: str, where: str = "--layers") -> list[int]:
    """The numbers of `text`, in its order. Raises `UsageError` for anything else."""
    numbers: list[int] = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([0-9]{1,9})(?:\s*-\s*([0-9]{1,9}))?\s*", part)
        if match is None:
            raise UsageError(
                f"{part!r} in {text!r} is neither a number nor a range such as 0-3",
                where,
                "write 0,6,7 or 0-3,60",
            )
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise UsageError(
                f"the range {part.strip()} runs backwards", where, f"write {last}-{first}, or list the layers"
            )
        if len(numbers) + last - first >= MAX_LISTED:
            raise UsageError(f"{text!r} lists more than {MAX_LISTED} numbers", where, "list fewer layers")
        numbers.extend(range(first, last + 1))
    return numbers


def compact_ranges(numbers: Sequence[int]) -> str:
    """The shortest text that `parse_ranges` reads back as `numbers`."""
    parts: list[str] = []
    position = 0
    while position < len(numbers):
        end = position + 1
        while end < len(numbers) and numbers[end] == numbers[end - 1] + 1:
            end += 1
        first, last = numbers[position], numbers[end - 1]
        parts.append(str(first) if first == last else f"{first}-{last}")
        position = end
    return ",".join(parts)


def layer_map_text(kept: Sequence[int]) -> str:
    """`new <- source` for every layer; a long map in ranges."""
    if len(kept) <= 16:
        return ", ".join(f"{new} <- {old}" for new, old in enumerate(kept))
    return f"0-{len(kept) - 1} <- {compact_ranges(kept)}"
