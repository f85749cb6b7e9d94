"""The commands that only look: inspect, diff, index."""

from __future__ import annotations

import re
from collections.abc import Iterator
from fnmatch import translate
from typing import Any

import click

from surgery.checkpoint import Checkpoint
from surgery.cli.options import SOURCE_OPTIONS, add_options
from surgery.cli.output import emit, emit_json, message
from surgery.errors import SourceError, UsageError, printable
from surgery.safetensors_file import StoredTensor

EXIT_DIFFERENT = 1


@click.command("inspect")
@click.argument("src", required=False)
@click.option(
    "--tensors",
    "pattern",
    is_flag=False,
    flag_value="*",
    metavar="[GLOB]",
    help="List tensors instead, one a line (name, dtype, shape, bytes, file; tabs between): all, or those of GLOB.",
)
@click.option("--json", "as_json", is_flag=True, help="The same facts as one JSON document on stdout.")
@add_options(SOURCE_OPTIONS)
@click.pass_context
def inspect_command(
    context: click.Context, /, src: str | None, pattern: str | None, as_json: bool, **options: Any
) -> None:
    """What is in SRC: stacks, layer kinds, experts, heads, quantisation, sizes, and what is odd about it.

    Reads headers and config only. SRC is a directory, a .safetensors file or an .index.json.

    \b
    Example:
      surgery inspect SRC
      surgery inspect SRC --tensors 'model.layers.0.*'

    Exit 3 where SRC is no valid checkpoint, after printing what could be read.
    """
    if src is None:
        hint = f"surgery inspect {pattern} --tensors" if pattern not in (None, "*") else "surgery inspect SRC"
        raise UsageError("no SRC given", "surgery inspect", hint)
    from surgery.inspection import inspect

    checkpoint = Checkpoint.survey(src, **options)
    if pattern is not None and not as_json:
        _list_tensors(checkpoint, pattern)
        inspection = inspect(checkpoint)
    else:
        inspection = inspect(checkpoint)
        if as_json:
            document = inspection if pattern is None else {**_fields(inspection), **_listing(checkpoint, pattern)}
            emit_json(document)
        else:
            from surgery.inspection_page import inspection_page

            emit(inspection_page(inspection))
    if not inspection.valid:
        context.exit(SourceError.exit_code)


def _fields(inspection: Any) -> dict[str, Any]:
    return {name: getattr(inspection, name) for name in inspection.__struct_fields__}


def _matching(checkpoint: Checkpoint, pattern: str) -> Iterator[StoredTensor]:
    matches = re.compile(translate(pattern)).match
    return (tensor for name, tensor in checkpoint.tensors.items() if matches(name))


def _list_tensors(checkpoint: Checkpoint, pattern: str) -> None:
    """In the order of files and bytes. Faults go to stderr: the list is the answer."""
    for finding in checkpoint.findings:
        if finding.severity == "fault":
            message(f"fault: {finding.what}")
    found = False
    for tensor in _matching(checkpoint, pattern):
        found = True
        shape = ",".join(map(str, tensor.shape))
        file = printable(checkpoint.files[tensor.file].name)
        emit(f"{printable(tensor.name)}\t{tensor.dtype}\t[{shape}]\t{tensor.nbytes}\t{file}")
    if not found:
        message(f"no tensor of {len(checkpoint.tensors)} matches {pattern}")


def _listing(checkpoint: Checkpoint, pattern: str) -> dict[str, Any]:
    return {
        "tensor_list": [
            {
                "name": tensor.name,
                "dtype": tensor.dtype,
                "shape": tensor.shape,
                "nbytes": tensor.nbytes,
                "file": checkpoint.files[tensor.file].name,
            }
            for tensor in _matching(checkpoint, pattern)
        ]
    }


@click.command("diff")
@click.argument("a")
@click.argument("b")
@click.option("--bytes/--no-bytes", "with_bytes", default=True, help="Compare the tensors' bytes (default) or not.")
@click.option("--json", "as_json", is_flag=True, help="Every difference in one JSON document on stdout.")
@add_options(SOURCE_OPTIONS)
@click.pass_context
def diff_command(context: click.Context, /, a: str, b: str, with_bytes: bool, as_json: bool, **options: Any) -> None:
    """Compare checkpoints A and B: names, shapes, dtypes, bytes, config, metadata, side files.

    How they are sharded, the order of config keys and documents (README.md) are told, and are no difference.

    \b
    Example:
      surgery diff SRC OUT
      surgery diff SRC OUT --no-bytes

    Exit 0: the same; 1: different.
    """
    from surgery.cli.progress import ConsoleProgress
    from surgery.comparison import common_pairs, compare
    from surgery.comparison_page import comparison_page

    sides = []
    for label, location in (("A", a), ("B", b)):
        checkpoint = Checkpoint.open(location, **options)
        for finding in checkpoint.findings:
            message(f"{label}: {finding.severity}: {finding.what}")
        sides.append(checkpoint)
    progress = ConsoleProgress("comparing")
    try:
        if with_bytes:
            progress.start(sum(tensor.nbytes for tensor, _ in common_pairs(*sides)))
        comparison = compare(*sides, with_bytes=with_bytes, advance=progress.add)
    finally:
        progress.close()
    if as_json:
        emit_json(comparison)
    else:
        emit(comparison_page(comparison))
    if not comparison.same:
        context.exit(EXIT_DIFFERENT)


@click.command("index")
@click.argument("directory", metavar="DIR")
@click.option("--allow-outside-links", is_flag=True, help="Follow links that leave the directory.")
def index_command(directory: str, allow_outside_links: bool) -> None:
    """Print the index that the headers of DIR's model files deserve. The index that is there is not looked at.

    \b
    Example:
      surgery index DIR > index.json && mv index.json DIR/model.safetensors.index.json
    """
    from surgery.reindex import headers_index

    index = headers_index(directory, allow_outside_links=allow_outside_links)
    for remark in index.remarks:
        message(remark)
    for line in index.lines():
        emit(line)
