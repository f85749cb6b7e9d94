"""Memory tables inside layers, left out on demand: tensors, the config's lists of layers with them, and the loss."""

from __future__ import annotations

import copy
from typing import Any

from surgery.draft import ConfigChange, Draft, changed, noted, with_tensors
from surgery.families.schema import Family
from surgery.sizes import human_size

MEMORY_GONE = "trim: memory tables dropped"


def without_memory(draft: Draft, family: Family) -> Draft:
    """`draft` without them; as it is where the model has none."""
    memory = family.memory
    if memory is None or draft.config is None:
        return draft
    gone = {name: MEMORY_GONE for name in draft.tensors if f".{memory.module}." in name}
    config = copy.deepcopy(draft.config)
    path = family.section(config)[0]
    section: Any = config
    for key in path:
        section = section[key]
    changes = []
    for field in memory.emptied:
        if section.get(field):
            changes.append(ConfigChange(".".join((*path, field)), section[field], [], "memory tables dropped"))
            section[field] = []
    if not gone and not changes:
        return draft
    nbytes = sum(draft.tensors[name].nbytes for name in gone)
    kept = {name: content for name, content in draft.tensors.items() if name not in gone}
    lighter = with_tensors(draft, kept, gone)
    lighter = changed(lighter, config=config, config_changes=(*draft.config_changes, *changes))
    return noted(
        lighter,
        "trim",
        f"memory tables ({memory.module}) dropped: {len(gone)} tensors, {human_size(nbytes)}; what the model looked up "
        "in them is lost",
    )
