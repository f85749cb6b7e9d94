"""Which tensors are of a multi-token-prediction stage: by the family's word, else by what such names look like."""

from __future__ import annotations

import re

from surgery.families.schema import Family

MTP_NAME = re.compile(r"(?:^|\.)(?:mtp|nextn)[^.]*\.")
LAYER_NAME = re.compile(r"(?:^|\.)(?:layers|h|blocks)\.([0-9]{1,9})\.")


def is_mtp_name(name: str, family: Family | None, depth: int | None) -> bool:
    """Whether a name is of a stage: `mtp.*`, a prefix of the family's, or a layer behind the last."""
    if MTP_NAME.search(name):
        return True
    mtp = family.mtp if family is not None else None
    if mtp is not None and name.startswith(mtp.prefixes or ("\0",)):
        return True
    if family is not None and mtp is None:
        return False
    prefixes = family.stack.prefixes if family is not None else ()
    match = LAYER_NAME.search(name)
    if match is None or depth is None or (prefixes and not name.startswith(prefixes)):
        return False
    return int(match[1]) >= depth
