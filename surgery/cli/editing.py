"""The commands that edit a checkpoint, and their twins under `plan`: trim, repack, rename."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import click

from surgery.cli.options import LAYOUTS, OUTPUT_OPTIONS, RESHARD_OPEN_OPTIONS, parse_pairs
from surgery.cli.writing import Operations, plan_group, register
from surgery.errors import UsageError
from surgery.layer_ranges import parse_ranges
from surgery.operations.dummy import Dummy
from surgery.operations.graft import Graft
from surgery.operations.keep_lists import METRICS, is_ranking, read_keep, read_scores
from surgery.operations.prune import Prune
from surgery.operations.rename import Rename
from surgery.operations.repack import Repack
from surgery.operations.reshard import Reshard
from surgery.operations.trim import Trim

__all__ = [
    "graft_command",
    "plan_group",
    "prune_command",
    "rename_command",
    "repack_command",
    "reshard_command",
    "trim_command",
]


def _finished(operations: Operations, max_shard_size: str | None, dummy: bool, settings: tuple[str, ...]) -> Operations:
    """What the options that every operation has add to it."""
    if settings and not dummy:
        raise UsageError("--set changes the config alone, which only a --dummy output may have", "--set", "add --dummy")
    if dummy:
        # Shards of no weights have no size: an option that does not apply is no part of the plan.
        return [*operations, Dummy(parse_pairs(settings, "--set", "write --set hidden_size=64", "KEY=VALUE"))]
    return operations if max_shard_size is None else [*operations, Repack(max_shard_size)]


def _build_trim(
    layers: tuple[str, ...],
    cover: bool,
    mtp: Literal["keep", "drop"],
    retarget: Literal["", "last"],
    reader: Literal["", "transformers", "vllm"],
    witness: Literal["", "skeleton"],
    tables: Literal["keep", "drop"],
    family: str,
    for_tp: int | None,
    for_ep: int | None,
    max_shard_size: str | None,
    dummy: bool,
    settings: tuple[str, ...],
) -> Operations:
    if not layers and not cover:
        raise UsageError("no layers chosen", "--layers", "write --layers 0,6,7, or --cover")
    if any(not each.strip() for each in layers):
        raise UsageError("--layers is empty", "--layers", "write --layers 0,6,7; did the command inside it fail?")
    trim = Trim(
        " ".join(layers),
        cover,
        mtp,
        retarget or "",
        reader or "",
        witness or "",
        family or "",
        tables,
        for_tp or 0,
        for_ep or 0,
    )
    return _finished([trim], max_shard_size, dummy, settings)


AS_OPTION = click.option("--as", "family", metavar="TYPE", help="Take the word of another model type's record.")
RANK_OPTIONS = (
    click.option("--for-tp", type=click.IntRange(1), help="Refuse a result that so many ranks cannot cut."),
    click.option("--for-ep", type=click.IntRange(1), help="Refuse a result that so many expert ranks cannot share."),
)


def _build_prune(
    keep: Path | None,
    scores: str | None,
    metric: str,
    experts: int | None,
    ratio: float | None,
    protected: tuple[str, ...],
    mtp_experts: Literal["", "prune", "full", "drop"] | None,
    family: str | None,
    for_tp: int | None,
    for_ep: int | None,
    max_shard_size: str | None,
    dummy: bool,
    settings: tuple[str, ...],
) -> Operations:
    if keep is not None and scores is not None:
        raise UsageError("a keep list and scores both choose", "--keep", "give one of them")
    choose, sums = read_scores(scores) if scores is not None else ("", {})
    pairs = parse_pairs(protected, "--protect", "write --protect model.layers.3=0,7", "LAYER=IDS")
    prune = Prune(
        keep=read_keep(keep) if keep is not None else {},
        choose=choose,
        scores=sums,
        metric=metric,
        experts=experts or 0,
        ratio=ratio or 0.0,
        protect={layer: parse_ranges(ids) for layer, ids in pairs.items()},
        ranking=keep is not None and is_ranking(keep),
        mtp_experts=mtp_experts or "",
        family=family or "",
        for_tp=for_tp or 0,
        for_ep=for_ep or 0,
    )
    return _finished([prune], max_shard_size, dummy, settings)


def _build_graft(
    other: str, tensors: tuple[str, ...], max_shard_size: str | None, dummy: bool, settings: tuple[str, ...]
) -> Operations:
    return _finished([Graft(tensors, other)], max_shard_size, dummy, settings)


def _build_reshard(
    tp: int, layout: str | None, ep: int | None, profile: str | None, dummy: bool, settings: tuple[str, ...]
) -> Operations:
    return _finished([Reshard(tp, layout or "", ep or 0, profile or "")], None, dummy, settings)


def _build_repack(max_shard_size: str | None, dummy: bool, settings: tuple[str, ...]) -> Operations:
    return _finished([] if dummy else [Repack(max_shard_size or "5GB")], None, dummy, settings)


def _build_rename(
    pairs: tuple[str, ...], regex: bool, max_shard_size: str | None, dummy: bool, settings: tuple[str, ...]
) -> Operations:
    renames = parse_pairs(pairs, "--map", "write --map model.language_model=model")
    return _finished([Rename(renames, regex)], max_shard_size, dummy, settings)


trim_command = register(
    "trim",
    _build_trim,
    (
        click.option(
            "--layers",
            multiple=True,
            metavar="LIST",
            help="Source layers in their new order: 0,6,7; 0-3 has both ends; a repeat copies the layer again. "
            "Repeatable: vision=0-3, encoder=0,1 name another stack.",
        ),
        click.option("--cover", is_flag=True, help="Keep the fewest layers that hold every kind."),
        click.option(
            "--mtp",
            type=click.Choice(["keep", "drop"]),
            default="keep",
            show_default=True,
            help="Multi-token-prediction stages: keep and renumber them, or drop tensors and count.",
        ),
        click.option(
            "--retarget",
            type=click.Choice(["last"]),
            help="Point ids of layers that go (targets of a draft head) at the last kept layers.",
        ),
        click.option(
            "--for",
            "reader",
            type=click.Choice(["transformers", "vllm"]),
            help="Keep what this program reads of every layer; both, when left out.",
        ),
        click.option(
            "--witness",
            type=click.Choice(["skeleton"]),
            help="Also compare the layers of transformers' own class, before and after (imports torch).",
        ),
        click.option(
            "--tables",
            type=click.Choice(["keep", "drop"]),
            default="keep",
            show_default=True,
            help="Tables inside layers that are looked up (Engram, n-gram embeddings): keep them, or leave them out.",
        ),
        AS_OPTION,
        *RANK_OPTIONS,
        *OUTPUT_OPTIONS,
    ),
    """Keep some layers of SRC, under new numbers, with a config that says so; write OUT.

    \b
    Example:
      surgery trim SRC OUT --layers 0,6,7
      surgery trim SRC OUT --layers 0-3,60 --dry-run
    """,
)

prune_command = register(
    "prune",
    _build_prune,
    (
        click.option(
            "--keep", metavar="FILE", type=click.Path(path_type=Path), help="The experts that stay, by layer."
        ),
        click.option(
            "--scores", metavar="FILE|router-norm|first", help="Choose by scores, by router rows, or the first ones."
        ),
        click.option(
            "--metric",
            type=click.Choice(list(METRICS)),
            default="reap",
            show_default=True,
            help="Which number of the scores.",
        ),
        click.option("--experts", type=click.IntRange(1), help="How many experts of each layer stay."),
        click.option("--ratio", type=float, help="The share of experts that goes, in place of --experts."),
        click.option(
            "--protect", "protected", multiple=True, metavar="LAYER=IDS", help="Experts that stay: model.layers.3=0,7."
        ),
        click.option(
            "--mtp-experts",
            type=click.Choice(["prune", "full", "drop"]),
            help="An MTP head's own experts: prune by the list, keep its width, or drop the head.",
        ),
        AS_OPTION,
        *RANK_OPTIONS,
        *OUTPUT_OPTIONS,
    ),
    """Keep some experts of every layer of SRC, renumbered, routers and counts with them; write OUT.

    \b
    Example:
      surgery prune SRC OUT --keep keep.json
      surgery prune SRC OUT --scores router-norm --ratio 0.5

    With --keep, --experts or --ratio take so many of each list from its front, as of a ranking.
    A keep list is {"experts": {"model.layers.3": [0, 2, 5]}}: source layers, ids in their new order.
    """,
)

graft_command = register(
    "graft",
    _build_graft,
    (
        click.option("--from", "other", metavar="OTHER", required=True, help="The checkpoint that has the tensors."),
        click.option(
            "--tensors",
            multiple=True,
            required=True,
            metavar="PATTERN",
            help="Their names in OTHER, with * and ?: 'mtp.*'. Repeatable.",
        ),
        *OUTPUT_OPTIONS,
    ),
    """SRC and tensors that OTHER has besides (a lost MTP head), with the counts and lists about them; write OUT.

    \b
    Example:
      surgery graft SRC OUT --from OTHER --tensors 'mtp.*'

    Nothing is replaced. Stages that lie behind the layers (model.layers.61.* in OTHER) get the numbers behind SRC's
    layers. Where SRC is quantised and the tensors are not, its lists say so.
    `surgery verify OUT --against SRC --against OTHER` proves it.
    """,
)

reshard_command = register(
    "reshard",
    _build_reshard,
    (
        click.option("--tp", type=click.IntRange(1, 4096), required=True, help="How many tensor-parallel ranks."),
        click.option("--layout", type=click.Choice(LAYOUTS), help="The layout of OUT; the source's own when left out."),
        click.option("--ep", type=click.IntRange(1), help="Experts go whole to so many ranks: equal to --tp."),
        click.option("--profile", metavar="VERSION", help="The version of vLLM whose names are written."),
        *OUTPUT_OPTIONS[1:],
    ),
    """Split SRC into rank partitions, deal them to another number of ranks, or merge them; write OUT.

    \b
    Example:
      surgery reshard SRC OUT --tp 2 --layout vllm
      surgery reshard SRC OUT --tp 2 --layout hf-rank --dry-run

    Merge with --tp 1 --layout hf. Layouts: hf, hf-rank (Hugging Face names, rank-local shapes), dcp-hf (sharded
    safetensors of torch.distributed.checkpoint), vllm (sharded_state), deepseek (model{i}-mp{N}).
    """,
    RESHARD_OPEN_OPTIONS,
)

repack_command = register(
    "repack",
    _build_repack,
    OUTPUT_OPTIONS,
    """The same tensors and config in storage shards of another size.

    \b
    Example:
      surgery repack SRC OUT --max-shard-size 2GB
    """,
)

rename_command = register(
    "rename",
    _build_rename,
    (
        click.option(
            "--map",
            "pairs",
            multiple=True,
            metavar="OLD=NEW",
            help="OLD a whole name or a dotted prefix. Repeatable; the first that matches counts.",
        ),
        click.option("--regex", is_flag=True, help="OLD is a Python pattern, NEW its replacement."),
        *OUTPUT_OPTIONS,
    ),
    """Other names for tensors; the config's quantisation module lists follow.

    \b
    Example:
      surgery rename SRC OUT --map model.language_model=model
    """,
)
