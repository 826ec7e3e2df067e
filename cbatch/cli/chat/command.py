"""`cbatch chat`: the command and its options."""

from __future__ import annotations

import io
import sys
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from cbatch.cli.common.console import notice
from cbatch.cli.common.exits import UserError
from cbatch.cli.common.loading import open_engine
from cbatch.cli.common.options import (
    SamplingOptions,
    engine_config,
    engine_options,
    model_options,
    sampling_options,
    trace_option,
)
from cbatch.cli.common.tracing import tracing
from cbatch.engine import with_overrides

if TYPE_CHECKING:
    from cbatch.cli.chat.controller import ChatController
    from cbatch.cli.chat.session.store import SessionStore
    from cbatch.engine import StepTracer


@click.command("chat")
@click.option("--auto-trim", is_flag=True, help="Leave out the oldest turns where the context is full.")
@click.option("--no-history", is_flag=True, help="Keep nothing of this chat on disk.")
@click.option("--from", "source", metavar="OUT.jsonl", help="Open a row of a batch's output as a session.")
@click.option("--index", type=click.IntRange(0), metavar="K", help="Of that row.")
@click.option("--prompts", metavar="FILE", help="The input of that batch, where the question stands.")
@model_options
@sampling_options
@engine_options(target_step_ms="auto")
@trace_option
@click.option("-q", "--quiet", is_flag=True, help="Nothing about the model.")
@click.option("-v", "--verbose", is_flag=True, help="Tell more about the engine.")
def chat(**options: Any) -> Literal[0, 1]:
    """Talk to a model, in many sessions at once; /help inside shows how.

    Where stdin or stdout is no terminal, each line of stdin is a turn of one conversation, and answers go to stdout.
    """
    SamplingOptions.from_values(options).check_for_chat()
    if (options["source"] is None) != (options["index"] is None):
        raise UserError("--from OUT.jsonl and --index K go together.")
    if options["prompts"] is not None and options["source"] is None:
        raise UserError("--prompts goes with --from OUT.jsonl --index K.")
    if sys.stdin is None or sys.stdout is None:
        raise UserError("A chat needs stdin and stdout, and one of them is closed.")
    others = {"the file of --from": options["source"], "the file of --prompts": options["prompts"]}
    with tracing(options["trace"], others, quiet=options["quiet"]) as trace:
        if sys.stdin.isatty() and sys.stdout.isatty():
            return _on_terminal(options, trace)
        return _through_pipe(options, trace)


def _on_terminal(options: dict[str, Any], trace: StepTracer | None) -> Literal[0]:
    from prompt_toolkit.history import InMemoryHistory

    from cbatch.cli.chat.session.store import InputHistory, SessionStore, default_folder
    from cbatch.cli.chat.tui.terminal import WELCOME, Terminal

    store, keeps = SessionStore(default_folder()), not options["no_history"]
    controller = _make_controller(options, store if keeps else None, trace)
    controller.current.add_notice(WELCOME)
    try:
        Terminal(controller, store, InputHistory(store) if keeps else InMemoryHistory()).run()
    finally:
        controller.client.close()
        if store.save_error:
            notice(store.save_error)
    kept = store.num_written
    if kept and not options["quiet"]:
        notice(f"{kept} session{'s are' if kept > 1 else ' is'} kept; /load in the next chat lists them")
    return 0


def _through_pipe(options: dict[str, Any], trace: StepTracer | None) -> Literal[0, 1]:
    from cbatch.cli.chat.pipe import Pipe
    from cbatch.cli.run.input.lines import read_lines

    controller = _make_controller(options, None, trace)
    if sys.stdin.isatty() and not options["quiet"]:
        notice("reading messages from the terminal, one a line; Ctrl-D ends them.")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    with closing(controller.client):
        return 0 if Pipe(sys.stdout).run(controller, read_lines(sys.stdin.buffer)) else 1


def _make_controller(options: dict[str, Any], store: SessionStore | None, trace: StepTracer | None) -> ChatController:
    from cbatch.cli.chat.controller import ChatController
    from cbatch.cli.chat.engine_client import EngineClient
    from cbatch.cli.chat.session.export import from_result

    sampling, begun = SamplingOptions.from_values(options), None
    if options["source"] is not None:
        prompts = Path(options["prompts"]) if options["prompts"] is not None else None
        begun = from_result(Path(options["source"]), options["index"], prompts, options["seed"])
    client = EngineClient(
        partial(open_engine, engine_config(options), quiet=options["quiet"], verbose=options["verbose"]), trace
    )
    controller = ChatController(
        client,
        system=options["system"],
        params=sampling.params,
        seed=options["seed"],
        auto_trim=options["auto_trim"],
        store=store,
    )
    if begun is not None:
        begun.params = with_overrides(begun.params, sampling.params)
        begun.system = begun.system or options["system"]
        empty = controller.current
        controller.add_loaded(begun)
        controller.close(empty)
        if options["prompts"] is None:
            controller.current.add_notice("The question to this answer is not in the file; --prompts FILE adds it.")
    return controller
