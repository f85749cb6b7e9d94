"""`surgery`: the root command, errors and exit codes.

Commands are imported when they are called, so that `--help` costs little more than click itself.
"""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
from typing import Any, NoReturn

import click

from surgery import __version__

COMMANDS: dict[str, tuple[str, str, str]] = {
    "inspect": (
        "surgery.cli.looking",
        "inspect_command",
        "What is in a checkpoint, and what is odd about it.",
    ),
    "trim": ("surgery.cli.editing", "trim_command", "Keep some layers, under new numbers, config and all."),
    "prune": ("surgery.cli.editing", "prune_command", "Keep some experts of every layer, routers and all."),
    "cover": ("surgery.cli.covering", "cover_command", "The fewest layers that keep every kind."),
    "graft": ("surgery.cli.editing", "graft_command", "Add tensors of another checkpoint: a lost MTP head."),
    "reshard": ("surgery.cli.editing", "reshard_command", "Rank partitions: split, merge, or deal anew."),
    "repack": ("surgery.cli.editing", "repack_command", "The same tensors in shards of another size."),
    "rename": ("surgery.cli.editing", "rename_command", "Other names for tensors."),
    "run": ("surgery.cli.writing", "run_command", "Several operations in one pass: a YAML recipe."),
    "plan": ("surgery.cli.editing", "plan_group", "The plan of any of these as JSON, nothing written."),
    "apply": ("surgery.cli.writing", "apply_command", "Carry out a plan file."),
    "verify": (
        "surgery.cli.checking",
        "verify_command",
        "Checksums, index, headers, layers; proof against SRC.",
    ),
    "check": (
        "surgery.cli.checking",
        "check_command",
        "Is it what its config says: names, shapes, dtypes.",
    ),
    "diff": (
        "surgery.cli.looking",
        "diff_command",
        "Names, shapes, dtypes, bytes and config of two checkpoints.",
    ),
    "index": ("surgery.cli.looking", "index_command", "The index that a directory's headers deserve."),
}

EXIT_USAGE = 2
EXIT_FAULT_OF_OURS = 70
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143

EPILOG = """\b
Exit codes: 0 done, nothing found; 1 it ran and the answer is no;
2 usage, or the operation cannot apply; 3 the source cannot be read or is
no valid checkpoint; 4 the output cannot be written; 70 a fault of ours;
130, 143 interrupted: run again to resume."""


class Terminated(BaseException):
    """SIGTERM: unwinds as Ctrl-C does, so that finished work is noted in the journal."""


class ReaderLeft(BaseException):
    """The reader of our stdout is gone. Not an OSError: click would turn that into exit 1 by itself."""


class LazyGroup(click.Group):
    """A group that knows its commands' names and first lines without importing them."""

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except BrokenPipeError as error:
            raise ReaderLeft from error

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in COMMANDS:
            return None
        module, attribute, _ = COMMANDS[name]
        command: click.Command = getattr(importlib.import_module(module), attribute)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, short) for name, (_, _, short) in COMMANDS.items()])


@click.group(cls=LazyGroup, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(__version__, prog_name="surgery")
def surgery() -> None:
    """Edit model checkpoints that do not fit in memory: from disk to disk, byte for byte, proven.

    \b
    Example:
      surgery trim SRC OUT --layers 0,6,7
      surgery verify OUT --against SRC
    """


def entry() -> NoReturn:
    """Run the command line and exit with the documented code."""
    for name in ("stdout", "stderr"):
        # Closed by whoever started us (cron, a daemon): writing to nowhere is no failure.
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    signal.signal(signal.SIGTERM, _on_sigterm)
    # A plan is hundreds of thousands of small records without cycles: looking for any takes a third of the time.
    gc.disable()
    code = run(sys.argv[1:])
    try:
        sys.stdout.flush()
    except BrokenPipeError:
        code = _reader_left(code)
    except OSError as error:
        code = _cannot_write_answer(error)
    # What is left in a buffer that cannot be written must not fail again at interpreter exit.
    if code and not _can_flush():
        os._exit(code)
    sys.exit(code)


def run(arguments: list[str]) -> int:
    """The exit code of one command line. Every failure has been told to the person when this returns."""
    try:
        result: Any = surgery.main(arguments, prog_name="surgery", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except ReaderLeft:
        return _reader_left(0)
    except (KeyboardInterrupt, click.Abort):
        return _interrupted(EXIT_INTERRUPTED, arguments)
    except Terminated:
        return _interrupted(EXIT_TERMINATED, arguments)
    except click.exceptions.NoArgsIsHelpError as error:
        click.echo(error.format_message(), err=True)
        return EXIT_USAGE
    except click.ClickException as error:
        return _usage(error, arguments)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except BaseException as error:
        return _failed(error, arguments)


def _on_sigterm(number: int, frame: object) -> None:
    raise Terminated


def _wants_json(arguments: list[str]) -> bool:
    return "--json" in arguments


def _usage(error: click.ClickException, arguments: list[str]) -> int:
    from surgery.cli.output import emit_error
    from surgery.errors import UsageError

    context = getattr(error, "ctx", None)
    command = context.command_path if context is not None else "surgery"
    emit_error(UsageError(error.format_message(), command, f"{command} --help"), as_json=_wants_json(arguments))
    return UsageError.exit_code


def _failed(error: BaseException, arguments: list[str]) -> int:
    from surgery.cli.output import emit_error
    from surgery.errors import OutputError, SourceError, SurgeryError

    if isinstance(error, SurgeryError):
        emit_error(error, as_json=_wants_json(arguments))
        return error.exit_code
    if isinstance(error, OSError):
        # The executor tells of its own files; what is left is a source that went away while it was looked at.
        failure = SourceError(
            error.strerror or str(error), str(error.filename or "surgery"), "check the source, and run again"
        )
        emit_error(failure, as_json=_wants_json(arguments))
        return failure.exit_code
    if isinstance(error, MemoryError):
        emit_error(
            OutputError("out of memory", "surgery", "give a smaller --memory or fewer --workers"),
            as_json=_wants_json(arguments),
        )
        return OutputError.exit_code
    import traceback

    traceback.print_exception(error, file=sys.stderr)
    emit_error(
        SurgeryError(
            f"a fault of ours: {type(error).__name__}: {error}",
            f"surgery {__version__}",
            "please report the traceback above with the command line",
        ),
        as_json=_wants_json(arguments),
    )
    return EXIT_FAULT_OF_OURS


def _interrupted(code: int, arguments: list[str]) -> int:
    import contextlib

    from surgery.cli.output import emit_json, message
    from surgery.errors import OutputError

    what = "interrupted: run the same command again to resume"
    if _wants_json(arguments):
        with contextlib.suppress(OSError, OutputError):
            emit_json({"error": {"kind": "interrupted", "what": what, "where": "", "mend": "", "exit_code": code}})
    message(what)
    return code


def _reader_left(code: int) -> int:
    """`surgery inspect SRC | head`: the reader has what it wanted; that is no failure."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return code


def _can_flush() -> bool:
    try:
        sys.stdout.flush()
        return True
    except OSError:
        return False


def _cannot_write_answer(error: OSError) -> int:
    from surgery.cli.output import emit_error
    from surgery.errors import OutputError

    failure = OutputError(f"cannot write the answer: {error.strerror}", "stdout", "check where stdout goes")
    emit_error(failure, as_json=False)
    return failure.exit_code
