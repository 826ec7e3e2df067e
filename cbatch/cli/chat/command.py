"""`cbatch chat`: the command and its options."""

from __future__ import annotations

import io
import os
import sys
import tempfile
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import click
from click.core import ParameterSource

from cbatch.base.config import EngineConfig
from cbatch.base.option import option
from cbatch.base.params import with_overrides
from cbatch.base.units import format_count
from cbatch.base.user_folders import user_folder
from cbatch.cli.common.configured_command import ConfiguredCommand, preset_option
from cbatch.cli.common.console import notice
from cbatch.cli.common.exits import UserError
from cbatch.cli.common.loading import open_engine
from cbatch.cli.common.options import (
    SAMPLING_FIELDS,
    SamplingOptions,
    engine_options,
    lora_option,
    make_options,
    record_options,
    replica_options,
    sampling_options,
    template_kwargs_option,
    tools_option,
)
from cbatch.cli.common.replica_options import ReplicaOptions

if TYPE_CHECKING:
    from cbatch.api import Engine
    from cbatch.cli.chat.controller import ChatController
    from cbatch.cli.chat.session.session import Session
    from cbatch.cli.chat.session.store import SessionStore


SCREEN_OPTIONS = "bell", "vi", "mouse", "transcript"

_session, _rows, _screen, _report = (
    partial(option, group=group) for group in ("Session", "Prompts and tools", "Screen", "Reports")
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """The options of `cbatch chat`; `continued` is --continue.

    typed: those that stand on the command line itself; they count more than what a session was saved with
    """

    question: str | None
    typed: Mapping[str, Any]
    fit: bool = _session(False, "Cut a document that is longer than the context in the middle.")
    lines: bool = _session(False, "Take each line of stdin as a message of one conversation.")
    json: bool = _session(False, "Write each reply as a JSON object, without a terminal.")
    continued: bool = _session(False, "Go on with the last saved session.", names=("-c", "--continue"))
    load: str | None = _session(None, "Go on with a saved session.", metavar="NAME|FILE")
    attach: tuple[str, ...] = _session((), "Attach a text or picture to the first message.", metavar="FILE")
    auto_trim: bool = _session(False, "Drop the oldest turns when the context is full.")
    no_history: bool = _session(False, "Save nothing of this chat to disk.")
    tools: tuple[str, ...] = tools_option()
    allow_tools: bool = _rows(False, "Run calls without asking.")
    template_kwargs: dict[str, Any] = template_kwargs_option()
    bell: float | None = _screen(
        None, "Ring the terminal's bell when a reply is done that took so long.", low=0, metavar="SECONDS"
    )
    vi: bool = _screen(False, "Edit lines as in vi.")
    mouse: bool = _screen(True, "Scroll by the wheel; text is selected with Shift.")
    transcript: bool = _screen(True, "Print the conversations when you leave.")
    quiet: bool = _report(False, "Print nothing about the model.", names=("-q", "--quiet"))
    verbose: bool = _report(False, "Print more about the engine.", names=("-v", "--verbose"))
    sampling: SamplingOptions
    engine: EngineConfig
    replicas: ReplicaOptions

    def check_usage(self) -> None:
        """Raises UserError or ConfigError if the options contradict each other or cannot be met."""
        self.sampling.check_for_chat()
        self.replicas.check(self.engine)
        if self.continued and self.load is not None:
            raise UserError("--continue and --load each open a session; give one of them.")
        if self.lines and self.question is not None:
            raise UserError("With --lines the messages are the lines of stdin; a QUESTION does not go with it.")
        if "allow_tools" in self.typed and not self.tools:
            raise UserError("--allow-tools goes with --tools FILE.")


MAIN = "model continued load system max_tokens temperature tools quantize lines json".split()


@click.command("chat", cls=ConfiguredCommand, main=MAIN)
@click.argument("question", nargs=-1)
@record_options(ChatOptions)
@sampling_options(in_chat=True)
@engine_options(target_step_ms={"default": "auto", "show_default": True})
@lora_option
@replica_options
@preset_option
def chat(**values: Any) -> Literal[0, 1]:
    """Chat with a model, in many sessions at once; /help lists the commands.

    With a QUESTION, of any number of words, write its answer to stdout and end. If stdin is not a terminal, all of it
    is one document that follows the QUESTION, or is the question itself.
    """
    source = click.get_current_context().get_parameter_source
    typed = {name: value for name, value in values.items() if source(name) is ParameterSource.COMMANDLINE}
    question = " ".join(values["question"]) or None
    options = make_options(ChatOptions, {**values, "question": question, "typed": typed})
    options.check_usage()
    try:
        (question or "").encode()
    except UnicodeEncodeError as error:
        raise UserError(f"The QUESTION is not valid UTF-8 (character {error.start + 1}).") from error
    if sys.stdin is None or sys.stdout is None:
        raise UserError("A chat needs stdin and stdout, and one of them is closed.")
    has_cursor = os.environ.get("TERM", "") not in ("", "dumb", "unknown")
    in_terminal = sys.stdin.isatty() and sys.stdout.isatty() and has_cursor
    if "fit" in typed and (sys.stdin.isatty() or options.lines):
        raise UserError("--fit is for a document on stdin; a terminal and --lines give messages.")
    if in_terminal and options.question is None and not (options.lines or options.json):
        return _run_in_terminal(options)
    if strange := [name for name in SCREEN_OPTIONS if name in typed]:
        is_on = typed[strange[0]] is True
        raise UserError(f"--{'' if is_on else 'no-'}{strange[0]} is for a chat on a terminal that has a screen.")
    return _run_in_pipe(options)


def _run_in_terminal(options: ChatOptions) -> Literal[0]:
    from prompt_toolkit.history import InMemoryHistory

    from cbatch.cli.chat.background_run import BackgroundRun, BatchEngines
    from cbatch.cli.chat.screen import print_conversations
    from cbatch.cli.chat.session.store import InputHistory, SessionStore
    from cbatch.cli.chat.terminal import WELCOME, Terminal

    engines = BatchEngines(options.engine, options.replicas)
    store = SessionStore(user_folder("STATE"))
    controller = _make_controller(options, engines.config, None if options.no_history else store, in_terminal=True)
    _open_session(options, controller, store)
    controller.current.add_notice(WELCOME, is_passing=True)
    history = InMemoryHistory() if options.no_history else InputHistory(store.folder)
    terminal = Terminal(
        controller, store, history, BackgroundRun(engines),
        is_vi=options.vi, takes_mouse=options.mouse, bell_seconds=options.bell,
    )  # fmt: skip
    for file in controller.current.attached:  # so that it is measured and shown
        terminal.attach(controller.current, file)
    try:
        terminal.run()
    finally:
        if options.transcript:
            with suppress(OSError):  # the terminal may be gone
                print_conversations(controller.closed + controller.sessions, sys.stdout)
        if store.save_error:
            notice(store.save_error)
    if store.written and not options.quiet:
        saved = format_count(len(store.written), "session")
        notice(f"saved {saved}; cbatch chat --continue goes on with the last one")
    return 0


def _run_in_pipe(options: ChatOptions) -> Literal[0, 1]:
    from cbatch.batch.lines import BOM, MAX_LINE_BYTES, Line, read_lines
    from cbatch.cli.chat.lines import Pipe
    from cbatch.cli.chat.pictures import PICTURE
    from cbatch.cli.chat.session.store import SessionStore
    from cbatch.media.pictures import MAX_BYTES

    if options.replicas.are_given:
        raise UserError("--replicas and --ray are for /run, which needs a terminal; cbatch run takes them, too.")
    is_terminal, question = sys.stdin.isatty(), options.question or ""
    takes_lines = options.lines or (is_terminal and options.question is None)
    if takes_lines:
        messages = read_lines(sys.stdin.buffer)
        if is_terminal and not options.quiet:
            notice("reading messages from the terminal, one per line; Ctrl-D ends the input")
    else:
        document = b"" if is_terminal else sys.stdin.buffer.read(MAX_LINE_BYTES + 1)
        if PICTURE.match(document) and not (options.continued or options.load):  # a saved session could not keep it
            file = click.get_current_context().with_resource(tempfile.NamedTemporaryFile(prefix="cbatch-"))  # noqa: SIM115
            file.write(document + sys.stdin.buffer.read(MAX_BYTES))
            file.flush()
            options, document = replace(options, attach=(*options.attach, file.name)), b""
        if not (question or options.attach or document.removeprefix(BOM).strip(b"\r\n")):
            raise UserError("There is no question: stdin is empty, and none was given.")
        messages = iter([Line.of(0, document)])
    store = SessionStore(user_folder("STATE"))
    keeps = not options.no_history and (options.continued or options.load is not None)
    controller = _make_controller(options, options.engine, store if keeps else None)
    _open_session(options, controller, store)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8", errors="replace")
    try:
        pipe = Pipe(controller, sys.stdout, as_json=options.json, fits=options.fit and not takes_lines)
        return 0 if pipe.run(messages, question=question, is_document=not takes_lines) else 1
    finally:
        controller.end_all()
        store.close()


def _make_controller(
    options: ChatOptions,
    config: EngineConfig,
    store: SessionStore | None,
    *,
    in_terminal: bool = False,
) -> ChatController:
    from cbatch.cli.chat.controller import ChatController
    from cbatch.cli.chat.engine_client import EngineClient
    from cbatch.cli.chat.toolbox import ToolBox
    from cbatch.tools.tool import load_tools

    shows_model = options.verbose or in_terminal
    sampling = options.sampling

    def load(config: EngineConfig) -> Engine:
        engine = open_engine(
            config, quiet=options.quiet, verbose=options.verbose, shows_model=shows_model, in_chat=True
        )
        if options.tools and not (engine.tokenizer is not None and engine.tokenizer.takes_tools):
            notice(f"the chat template of {engine.loaded.name} takes no tools, so --tools has no effect")
        return engine

    tools = ToolBox(load_tools(options.tools), allows_all=options.allow_tools)  # before a model is loaded for them
    client = EngineClient(partial(load, config), template_kwargs=options.template_kwargs)
    return ChatController(
        client,
        model_name=config.model or "",
        open_model=lambda name: load(replace(config, model=name, revision=None, lora=None)),
        tools=tools,
        system=sampling.system,
        params=sampling.params,
        run_seed=sampling.seed,
        auto_trim=options.auto_trim,
        store=store,
    )


def _apply_typed(options: ChatOptions, session: Session) -> None:
    """Has what was typed count for a session from a file, from now on."""
    typed, nothing = options.typed, dict.fromkeys([*SAMPLING_FIELDS, "json_schema", "system", "seed"])
    given = SamplingOptions.from_values({**nothing, "param": {}, **typed})
    session.params = with_overrides(session.params, given.params)
    session.template_kwargs = {**session.template_kwargs, **typed.get("template_kwargs", {})}
    session.system = session.system if given.system is None else given.system or None
    session.seed = session.seed if "seed" not in typed else None  # then it is the chat's own


def _open_session(options: ChatOptions, controller: ChatController, store: SessionStore) -> None:
    """Opens what --continue or --load names, and attaches what --attach does. Raises UserError if it is not there."""
    from cbatch.cli.chat.pictures import read_attachment
    from cbatch.cli.chat.session.files import as_path

    name = options.load
    if options.continued or name is not None:
        path = next((saved.path for saved in store.saved_sessions()), None) if name is None else store.lookup(name)
        if path is None:
            none = f"There is no saved session {name[:80]}; /load in a chat lists them." if name is not None else ""
            raise UserError(none or "No session is saved yet.")
        session = store.open(path)
        _apply_typed(options, session)
        controller.open_saved(session)
    controller.current.attached += [read_attachment(as_path(name)) for name in options.attach]
