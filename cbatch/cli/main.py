"""The `cbatch` command: its subcommands, and how errors become exit codes."""

from __future__ import annotations

import gc
import importlib
import os
import signal
import sys
import warnings
from difflib import get_close_matches
from typing import Any

import click

from cbatch import __version__
from cbatch.base.errors import CbatchError, EngineError, Interrupted, ReaderGone, RunFailed
from cbatch.base.spelling import similar_name
from cbatch.cli.common.console import notice
from cbatch.cli.common.exits import EXIT_FATAL, EXIT_PIPE, EXIT_USAGE, SIGNALS, raise_interrupted

COMMANDS = ("run", "verify", "convert", "chat", "perplexity", "quantize", "bench", "info", "models")
"""Each is made in a module `command` of its own folder."""


class LazyGroup(click.Group):
    """Imports a subcommand only when it is needed, so that help opens fast."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        command: click.Command = getattr(importlib.import_module(f"cbatch.cli.{cmd_name}.command"), cmd_name)
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args[0] not in COMMANDS and (meant := similar_name(args[0], COMMANDS)):
            ctx.fail(f"No such command {args[0]!r}. Did you mean {meant}?")
        return super().resolve_command(ctx, args)


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "auto_envvar_prefix": "CBATCH"})
@click.version_option(__version__, prog_name="cbatch")
def cli() -> None:
    """Chat with language models, and generate text for many prompts at once, by continuous batching."""


def run_command(arguments: list[str] | None = None) -> int:
    """Runs the command line and returns its exit code. Every error becomes a sentence on stderr."""
    try:
        os.getcwd()  # noqa: PTH109
    except OSError:  # libraries would end the process
        notice("The working folder does not exist any more; change to another one.")
        return EXIT_USAGE
    try:
        result: Any = cli.main(arguments, prog_name="cbatch", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        if isinstance(error, click.NoSuchOption) and error.possibilities:  # of which Click tells three, by alphabet
            closest = get_close_matches(error.option_name, error.possibilities, 1)
            error = click.NoSuchOption(error.option_name, possibilities=closest)
        message = error.format_message()
        if message.startswith("Usage:"):  # no command was given, so this is the whole help
            print(message, file=sys.stderr)
        else:
            notice(message)
        return EXIT_USAGE
    except Interrupted as error:
        notice(str(error))
        return error.exit_code
    except ReaderGone:
        return EXIT_PIPE
    except CbatchError as error:
        notice(str(error))
        return EXIT_FATAL if isinstance(error, EngineError | RunFailed) else EXIT_USAGE
    except (KeyboardInterrupt, SystemExit):
        raise
    except BaseException as error:  # the disk, the device, memory, a bug or a panic: a sentence, and never exit code 1
        notice(f"{_reason(error)}; finished rows are written.")
        return EXIT_FATAL


def _reason(error: BaseException) -> str:
    """The reason why the command ended, without a full stop."""
    text = str(error).strip().partition("\n")[0].rstrip(".")
    if isinstance(error, MemoryError):
        return "There is not enough memory"
    if isinstance(error, RuntimeError) and "start new thread" in text:
        return "No further thread can be started; ulimit -u may be too low"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    if isinstance(error, ImportError | OSError):
        return f"A part of a package cannot be loaded: {text}"
    return f"This should not have happened: {type(error).__name__}{text and ': '}{text}"


def hide_warnings() -> None:
    """Keeps warnings of libraries from stderr, unless the user has asked Python for them."""
    if not sys.warnoptions:
        warnings.simplefilter("ignore")


def main() -> None:
    """Runs the command and ends the process at once, even if threads still wait for input or for the device."""
    gc.disable()  # until `open_engine`: imports leave no garbage, but collections would walk over them
    while (fd := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass  # stdin, stdout or stderr may be closed; no file that we open may get its number
    os.close(fd)
    hide_warnings()
    for signum in SIGNALS:
        signal.signal(signum, raise_interrupted)
    code = run_command()
    for signum in SIGNALS:
        signal.signal(signum, signal.SIG_IGN)
    for stream in filter(None, (sys.stdout, sys.stderr)):  # a closed one is None
        try:
            stream.flush()
        except OSError:
            code = code or EXIT_PIPE
    os._exit(code)


if __name__ == "__main__":
    main()
