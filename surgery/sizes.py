"""Byte counts as people write and read them: `5GB` is 5 * 10^9 bytes, `5GiB` is 5 * 2^30."""

from __future__ import annotations

import re
from fractions import Fraction

from surgery.errors import UsageError

_UNITS = {"": 1, "B": 1} | {
    f"{letter}{suffix}": base**power
    for power, letter in enumerate("KMGT", 1)
    for suffix, base in (("B", 1000), ("", 1000), ("iB", 1024))
}


def parse_size(text: str, where: str) -> int:
    """The bytes that `text` says, exactly. Raises `UsageError` for anything that is no positive size."""
    match = re.fullmatch(r"\s*([0-9]{1,20}(?:\.[0-9]{1,9})?)\s*([A-Za-z]*)\s*", text)
    units = {unit.lower(): factor for unit, factor in _UNITS.items()}
    factor = units.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise UsageError(f"{text!r} is no size", where, "write a number with a unit, such as 5GB or 512MiB")
    nbytes = Fraction(match[1]) * factor
    if nbytes < 1:
        raise UsageError(f"{text!r} is less than one byte", where, "write a size such as 5GB")
    return int(nbytes)


def human_size(nbytes: int) -> str:
    """`nbytes` to four digits in decimal units, as disks and the hub count."""
    if nbytes < 1000:
        return f"{nbytes} B"
    size = float(nbytes)
    for unit in ("kB", "MB", "GB", "TB", "PB"):
        size /= 1000
        if size < 999.95 or unit == "PB":
            break
    return f"{size:.2f} {unit}" if size < 10 else f"{size:.1f} {unit}"
