"""Repack: the same tensors in storage shards of another size."""

from __future__ import annotations

import msgspec

from surgery.draft import Draft, changed
from surgery.sizes import parse_size


class Repack(msgspec.Struct, frozen=True, forbid_unknown_fields=True, tag_field="operation", tag="repack"):
    """`max_shard_size`: tensor bytes a file, as `5GB` (decimal) or `5GiB` (binary)."""

    max_shard_size: str = "5GB"

    def apply(self, draft: Draft) -> Draft:
        return changed(draft, max_shard_bytes=parse_size(self.max_shard_size, "--max-shard-size"))
