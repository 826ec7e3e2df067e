"""`cbatch chat`: the command and its options."""

from __future__ import annotations

import io
import sys
from contextlib import closing
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import click

from cbatch.cli.common.configured_command import ConfiguredCommand, preset_option
from cbatch.cli.common.console import notice
from cbatch.cli.common.exits import UserError
from cbatch.cli.common.loading import open_engine
from cbatch.cli.common.options import (
    engine_options,
    make_options,
    model_options,
    replica_options,
    sampling_options,
    template_kwargs_option,
    trace_option,
)
from cbatch.cli.common.replica_options import ReplicaOptions
from cbatch.cli.common.tracing import tracing
from cbatch.engine import with_overrides

if TYPE_CHECKING:
    from cbatch.cli.chat.controller import ChatController
    from cbatch.cli.chat.session.store import SessionStore
    from cbatch.cli.common.options import SamplingOptions
    from cbatch.engine import EngineConfig, StepTracer


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """One field for each option of `cbatch chat`, under the option's name; `source` is --from."""

    auto_trim: bool
    no_history: bool
    source: str | None
    index: int | None
    prompts: str | None
    template_kwargs: dict[str, Any]
    trace: str | None
    quiet: bool
    verbose: bool
    sampling: SamplingOptions
    engine: EngineConfig
    replicas: ReplicaOptions

    def check_usage(self) -> None:
        """Raises UserError or ConfigError if the options contradict each other or cannot be met."""
        self.sampling.check_for_chat()
        self.replicas.check(self.engine, self.trace)
        if (self.source is None) != (self.index is None):
            raise UserError("--from OUT.jsonl and --index K go together.")
        if self.prompts is not None and self.source is None:
            raise UserError("--prompts goes with --from OUT.jsonl --index K.")


@click.command("chat", cls=ConfiguredCommand)
@click.option("--auto-trim", is_flag=True, help="Drop the oldest turns when the context is full.")
@click.option("--no-history", is_flag=True, help="Save nothing of this chat to disk.")
@click.option("--from", "source", metavar="OUT.jsonl", help="Open a row of a batch's output as a session.")
@click.option("--index", type=click.IntRange(0), metavar="K", help="Index of that row.")
@click.option("--prompts", metavar="FILE", help="Input of that batch; the question is read from it.")
@template_kwargs_option
@model_options
@sampling_options(in_chat=True)
@engine_options(target_step_ms="auto")
@replica_options
@trace_option
@preset_option
@click.option("-q", "--quiet", is_flag=True, help="Print nothing about the model.")
@click.option("-v", "--verbose", is_flag=True, help="Print more about the engine.")
def chat(**values: Any) -> Literal[0, 1]:
    """Chat with a model, in many sessions at once; /help lists the commands.

    If stdin or stdout is not a terminal, each line of stdin is a message of one conversation, and the replies go to
    stdout.
    """
    options = make_options(ChatOptions, values)
    options.check_usage()
    if sys.stdin is None or sys.stdout is None:
        raise UserError("A chat needs stdin and stdout, and one of them is closed.")
    others = {"the file of --from": options.source, "the file of --prompts": options.prompts}
    with tracing(options.trace, others, quiet=options.quiet) as trace:
        if sys.stdin.isatty() and sys.stdout.isatty():
            return _run_in_terminal(options, trace)
        return _run_in_pipe(options, trace)


def _run_in_terminal(options: ChatOptions, trace: StepTracer | None) -> Literal[0]:
    from prompt_toolkit.history import InMemoryHistory

    from cbatch.cli.chat.background_run import BackgroundRun
    from cbatch.cli.chat.batch_engines import BatchEngines
    from cbatch.cli.chat.session.store import InputHistory, SessionStore, default_folder
    from cbatch.cli.chat.tui.terminal import WELCOME, Terminal

    store, keeps = SessionStore(default_folder()), not options.no_history
    engines = BatchEngines(options.engine, options.replicas)
    controller = _make_controller(options, engines.config, store if keeps else None, trace)
    controller.current.add_notice(WELCOME)
    history = InputHistory(store.folder) if keeps else InMemoryHistory()
    try:
        Terminal(controller, store, history, BackgroundRun(engines)).run()
    finally:
        controller.client.close()
        if store.save_error:
            notice(store.save_error)
    count = len(store.written)
    if count and not options.quiet:
        notice(f"saved {count} session{'s' if count > 1 else ''}; /load lists them in the next chat")
    return 0


def _run_in_pipe(options: ChatOptions, trace: StepTracer | None) -> Literal[0, 1]:
    from cbatch.cli.chat.pipe import Pipe
    from cbatch.engine import read_lines

    if options.replicas.are_given:
        raise UserError("--replicas and --ray are for /run, which needs a terminal; cbatch run takes them, too.")
    controller = _make_controller(options, options.engine, None, trace)
    if sys.stdin.isatty() and not options.quiet:
        notice("reading messages from the terminal, one per line; Ctrl-D ends the input")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    with closing(controller.client):
        return 0 if Pipe(sys.stdout).run(controller, read_lines(sys.stdin.buffer)) else 1


def _make_controller(
    options: ChatOptions, config: EngineConfig, store: SessionStore | None, trace: StepTracer | None
) -> ChatController:
    from cbatch.cli.chat.controller import ChatController
    from cbatch.cli.chat.engine_client import EngineClient
    from cbatch.cli.chat.session.export import from_result

    sampling = options.sampling
    load = partial(open_engine, config, quiet=options.quiet, verbose=options.verbose, trace=trace)
    controller = ChatController(
        EngineClient(load, template_kwargs=options.template_kwargs, closes_engine=trace is not None),
        system=sampling.system,
        params=sampling.params,
        seed=sampling.seed,
        auto_trim=options.auto_trim,
        store=store,
    )
    if options.source is not None and options.index is not None:
        prompts = Path(options.prompts) if options.prompts is not None else None
        opened = from_result(Path(options.source), options.index, prompts, sampling.seed)
        opened.params = with_overrides(opened.params, sampling.params)
        opened.system = opened.system or sampling.system
        empty = controller.current
        controller.add_loaded(opened)
        controller.close(empty)
        if options.prompts is None:
            controller.current.add_notice("The file does not hold the question to this reply; --prompts FILE adds it.")
    return controller
