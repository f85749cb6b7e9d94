"""Files beside the config that describe the source's layers a second time: carried where they are understood, else left
behind, never copied stale.

`quant_model_description*.json` (Ascend ModelSlim) maps tensor names to schemes, and vLLM-Ascend reads it; Whisper's
`generation_config.json` names attention heads by decoder layer; `params.json` (Meta, Mistral), `recipe.yaml`
(llm-compressor) and `adapter_config.json` (PEFT) no reader of the new checkpoint needs.
"""

from __future__ import annotations

import json
import re
from typing import Any

import msgspec

from surgery.draft import ALL_KEYS, ConfigChange, Draft, SideFile, changed, json_text, noted
from surgery.errors import SourceError
from surgery.families.carrying import LayerMap
from surgery.quantization import Move, is_numbered
from surgery.storage import read_bytes

_MAX_NBYTES = 64 << 20
_SCHEMES = re.compile(r"quant_model_description[\w.-]*\.json")


def carry_second_descriptions(draft: Draft, move: Move, layers: LayerMap, stack: str) -> Draft:
    """`draft` with those files about the new layers, or without them."""
    for side in draft.side_files:
        if _SCHEMES.fullmatch(side.name):
            draft = _carry_schemes(draft, side, move)
        elif side.name == "generation_config.json" and stack == "decoder":
            draft = _carry_alignment(draft, side, layers)
        elif _is_stale(draft, side):
            kept = tuple(each for each in draft.side_files if each is not side)
            draft = noted(
                changed(draft, side_files=kept), "trim", f"{side.name} is of the source's layers: left behind"
            )
    return draft


def _text(draft: Draft, side: SideFile) -> str:
    if side.text is not None:
        return side.text
    try:
        return read_bytes(draft.roots[side.root] / side.source_name, _MAX_NBYTES).decode("utf-8-sig", "replace")
    except SourceError:
        return ""


def _document(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        return None


def _is_stale(draft: Draft, side: SideFile) -> bool:
    if side.name == "params.json":
        return '"n_layers"' in _text(draft, side)
    if side.name == "adapter_config.json":
        return '"layers_to_transform"' in _text(draft, side)
    return side.name in ("recipe.yaml", "llmc_qconfig.yaml") and is_numbered(_text(draft, side))


def _replaced(draft: Draft, old: SideFile, new: SideFile) -> Draft:
    return changed(draft, side_files=tuple(new if each is old else each for each in draft.side_files))


def _carry_schemes(draft: Draft, side: SideFile, move: Move) -> Draft:
    text = _text(draft, side)
    document = _document(text)
    if not isinstance(document, dict):
        return draft
    moved: dict[str, Any] = {}
    for name, value in document.items():
        news = move(name)
        moved |= dict.fromkeys([name] if news is None else news, value)
    if list(moved) == list(document):
        return draft
    change = ConfigChange(
        f"{side.name}:{ALL_KEYS}", f"{len(document)} entries", f"{len(moved)} entries", "names of tensors"
    )
    new = msgspec.structs.replace(side, text=json_text(moved, text, side.name))
    return changed(_replaced(draft, side, new), config_changes=(*draft.config_changes, change))


def _carry_alignment(draft: Draft, side: SideFile, layers: LayerMap) -> Draft:
    """Heads of layers that go are gone; of the others the first copy counts."""
    text = _text(draft, side)
    document = _document(text)
    heads = document.get("alignment_heads") if isinstance(document, dict) else None
    if not isinstance(heads, list) or not all(isinstance(head, list) and len(head) == 2 for head in heads):
        return draft
    kept = list(layers.kept)
    new = [[kept.index(layer), head] for layer, head in heads if layer in kept]
    if new == heads:
        return draft
    edited = json_text({**document, "alignment_heads": new}, text, side.name)
    change = ConfigChange(f"{side.name}:alignment_heads", heads, new, "heads by layer")
    draft = _replaced(draft, side, msgspec.structs.replace(side, text=edited))
    return changed(draft, config_changes=(*draft.config_changes, change))
