"""The commands that prove: verify and check."""

from __future__ import annotations

import click

from surgery.check import check, check_text
from surgery.cli.output import emit, emit_json
from surgery.cli.progress import ConsoleProgress
from surgery.errors import UsageError
from surgery.storage import local_path
from surgery.verify import report_text, sums, verify

EXIT_FINDINGS = 1


@click.command("verify")
@click.argument("directory", metavar="DIR")
@click.option(
    "--against",
    "against",
    metavar="SRC",
    multiple=True,
    help="Derive every byte again from SRC, by an independent path. Repeatable for an output of several sources.",
)
@click.option(
    "--sample", type=click.FloatRange(0, 1, min_open=True), default=1.0, help="Compare this share of the tensors."
)
@click.option("--seed", type=int, default=0, help="Which share --sample takes.")
@click.option("--allow-outside-links", is_flag=True, help="Follow links that leave DIR.")
@click.option("--workers", type=click.IntRange(1, 64), default=2, show_default=True, help="Threads that hash.")
@click.option("--sums", "as_sums", is_flag=True, help="Print lines for `sha256sum -c` and judge nothing.")
@click.option("--json", "as_json", is_flag=True, help="The report as one JSON document on stdout.")
@click.pass_context
def verify_command(
    context: click.Context,
    directory: str,
    against: tuple[str, ...],
    sample: float,
    seed: int,
    allow_outside_links: bool,
    workers: int,
    as_sums: bool,
    as_json: bool,
) -> None:
    """Judge DIR: integrity (headers, index, every checksum of its manifest) and loading, as far as headers tell.

    \b
    Example:
      surgery verify OUT
      surgery verify OUT --against SRC --sample 0.1
      surgery verify OUT --sums > SHA256SUMS

    The sums are checked inside: (cd OUT && sha256sum -c ../SHA256SUMS).

    Exit 0: nothing found; 1: findings; 3: there is nothing to judge.
    """
    path = local_path(directory)
    if as_sums and as_json:
        raise UsageError("--sums prints lines for sha256sum, no JSON", "--sums", "leave one of them out")
    if as_sums:
        for line in sums(path):
            emit(line)
        return
    if not against and (sample < 1 or seed):
        raise UsageError("--sample and --seed choose what is compared with SRC", "--sample", "add --against SRC")
    report = verify(
        path,
        against=[local_path(source) for source in against],
        sample=sample,
        seed=seed,
        workers=workers,
        progress=ConsoleProgress("verifying"),
        allow_outside_links=allow_outside_links,
    )
    if as_json:
        emit_json(report)
    else:
        emit(report_text(report))
    if report.failed:
        context.exit(EXIT_FINDINGS)


@click.command("check")
@click.argument("directory", metavar="DIR")
@click.option("--against", "source", metavar="SRC", help="Also: each layer is what the layer of SRC it came from was.")
@click.option("--for-tp", type=click.IntRange(1, 4096), help="Can it run on so many tensor-parallel ranks?")
@click.option("--for-ep", type=click.IntRange(1, 4096), help="Can its experts be dealt to so many ranks?")
@click.option("--as", "named", metavar="TYPE", help="Take the record and the class of another model type.")
@click.option("--allow-unverified", is_flag=True, help="Exit 0 also where a question could not be answered.")
@click.option("--allow-outside-links", is_flag=True, help="Follow links that leave DIR.")
@click.option("--json", "as_json", is_flag=True, help="The report as one JSON document on stdout.")
@click.pass_context
def check_command(
    context: click.Context,
    directory: str,
    source: str | None,
    for_tp: int | None,
    for_ep: int | None,
    named: str | None,
    allow_unverified: bool,
    allow_outside_links: bool,
    as_json: bool,
) -> None:
    """Is DIR what its config says: every name, shape and dtype that the model's class demands, from headers alone.

    The class is built without weights (transformers, torch and accelerate are imported); no weight is read.

    \b
    Example:
      surgery check DIR
      surgery check DIR --for-tp 2 --json

    Exit 0: all passed; 1: something failed, or could not be answered (without --allow-unverified); 3: there is
    nothing to judge.
    """
    against = local_path(source) if source is not None else None
    report = check(
        local_path(directory),
        against=against,
        for_tp=for_tp or 0,
        for_ep=for_ep or 0,
        named=named or "",
        allow_outside_links=allow_outside_links,
    )
    if as_json:
        emit_json(report)
    else:
        emit(check_text(report))
    if report.verdict == "failed" or (report.verdict == "unverified" and not allow_unverified):
        context.exit(EXIT_FINDINGS)
