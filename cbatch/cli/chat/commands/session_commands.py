"""Commands about sessions, their turns and their settings."""

from __future__ import annotations

import difflib
import json
from typing import Any

from cbatch.cli.chat.commands.registry import (
    COMMANDS,
    CommandContext,
    command,
    format_turn_count,
    parse_number,
    require_argument,
)
from cbatch.cli.chat.controller import RETRY_TEMPERATURE
from cbatch.cli.common.exits import UserError
from cbatch.cli.common.options import RUN_ONLY_PARAMS
from cbatch.engine import PARAM_NAMES, RequestError, SamplingParams, with_overrides

SETTABLE = tuple(name for name in PARAM_NAMES if name not in ("seed", *RUN_ONLY_PARAMS))

KEYS = (
    "",
    "Enter sends            Alt-Enter begins a new line    Ctrl-X Ctrl-E $EDITOR",
    "Alt-1 … 9, Ctrl-arrows go to another session          PageUp, PageDown scroll",
    "Tab completes          Ctrl-R searches what was typed",
    "Ctrl-C stops this session's answer                    Ctrl-D leaves",
    "In the bar … marks a session that is answering, * one with something unread.",
)


@command("help", "[COMMAND]", "command")
def do_help(context: CommandContext, name: str) -> None:
    """this list"""
    if name and name.lstrip("/") not in COMMANDS:
        raise UserError(f"There is no command /{name.lstrip('/')[:40]}; /help alone shows them all.")
    shown = [COMMANDS[name.lstrip("/")]] if name.lstrip("/") in COMMANDS else list(COMMANDS.values())
    shown.sort(key=lambda item: item.name)
    lines = [f"/{item.name} {item.usage}".ljust(25) + f" {item.description}" for item in shown]
    context.show(*lines, *(KEYS if len(shown) > 1 else []))


@command("new", "[NAME]")
def do_new(context: CommandContext, name: str) -> None:
    """opens a session"""
    context.controller.new_session(name or None)


@command("switch", "NAME|NUMBER", "session")
def do_switch(context: CommandContext, name: str) -> None:
    """goes to a session"""
    require_argument(name, "/switch NAME or /switch NUMBER")
    context.controller.switch(context.controller.find(name))


@command("list")
def do_list(context: CommandContext, _: str) -> None:
    """shows the sessions"""
    lines = []
    for number, session in enumerate(context.controller.sessions, start=1):
        state = "answering" if session.is_busy else "unread" if session.is_unread else ""
        words = " ".join(session.turns[0].text.split())[:40] if session.turns else "empty"
        lines.append(f"{number} {session.name:<12} {format_turn_count(len(session.turns))}  {state:<10} {words}")
    context.show(*lines)


@command("rename", "NAME")
def do_rename(context: CommandContext, name: str) -> None:
    """gives this session another name"""
    require_argument(name, "/rename NAME")
    context.controller.rename(context.session, name)


@command("close", "[NAME|NUMBER]", "session")
def do_close(context: CommandContext, name: str) -> None:
    """closes this session, or another"""
    context.controller.close(context.controller.find(name) if name else context.session)


@command("fork", "[NAME]")
def do_fork(context: CommandContext, name: str) -> None:
    """a new session from this point"""
    before = context.session
    context.controller.fork(before, name or None)
    context.show(f"from here on apart from {before.name}")


@command("all", "TEXT")
def do_all(context: CommandContext, text: str) -> None:
    """says something in every session at once"""
    require_argument(text, "/all TEXT")
    for session in list(context.controller.sessions):
        context.controller.send(session, text)


@command("retry", "[N]")
def do_retry(context: CommandContext, count: str) -> None:
    """answers again; N answers side by side"""
    number = parse_number(count, 1, 32) if count else 1
    first = context.controller.retry(context.session, number)
    if context.controller.is_greedy(context.session):
        context.show(f"sampled at temperature {RETRY_TEMPERATURE}; this session is greedy and would say the same")
    before = context.session.last.fallback if context.session.last is not None else 0
    if number > 1:
        context.show(f"/pick K keeps one of {first} to {first + number - 1}, or {before}, which is the answer before")
    else:
        context.show(f"/pick {before} takes the answer before back")


@command("pick", "K")
def do_pick(context: CommandContext, number: str) -> None:
    """keeps one of several answers"""
    require_argument(number, "/pick K")
    context.controller.pick(context.session, parse_number(number, 0, 10**6))


@command("undo")
def do_undo(context: CommandContext, _: str) -> None:
    """takes the last message back, into the input line"""
    context.ui.set_input(context.controller.undo(context.session))


@command("edit")
def do_edit(context: CommandContext, _: str) -> None:
    """the last message in $EDITOR, asked anew"""
    session, last = context.session, context.session.last
    if last is None:
        raise UserError("There is no message yet.")

    def ask(text: str) -> None:
        try:
            context.controller.replace(session, last, text)
        except UserError:
            context.ui.set_input(text)
            raise

    context.ui.open_editor(last.text, ask)


@command("stop", "[all]")
def do_stop(context: CommandContext, which: str) -> None:
    """cuts off this session's answer, or all"""
    sessions = list(context.controller.sessions) if which == "all" else [context.session]
    stopped = [context.controller.stop(session) for session in sessions]
    if not any(stopped):
        raise UserError("Nothing is being answered.")


@command("continue")
def do_continue(context: CommandContext, _: str) -> None:
    """goes on with an answer that was cut off"""
    context.controller.continue_reply(context.session)


@command("trim", "[N]")
def do_trim(context: CommandContext, count: str) -> None:
    """leaves out the oldest turns"""
    wanted = parse_number(count, 1, 10**6) if count else None
    gone = context.controller.trim(context.session, wanted)
    if wanted is not None:
        lost = f"the model is not shown the {gone} oldest turns any more"
        context.show(lost if gone else "there is no older turn to go")


@command("system", "[TEXT|-]")
def do_system(context: CommandContext, text: str) -> None:
    """the system message; - takes it away"""
    if text:
        context.session.system = None if text == "-" else text
        context.controller.save(context.session)
    context.show(f"system message: {context.session.system or 'none'}")


@command("set", "[NAME [VALUE]]", "parameter")
def do_set(context: CommandContext, text: str) -> None:
    """sampling parameters; `default` takes one back"""
    name, _, value = text.partition(" ")
    params = context.session.params
    if name and name not in SETTABLE:
        close = difflib.get_close_matches(name, SETTABLE, 1)
        raise UserError(f"There is no parameter {name}" + (f"; did you mean {close[0]}?" if close else "."))
    if value.strip() in ("default", "null"):
        params.pop(name, None)
    elif value:
        chosen = _value(name, value.strip())
        new = getattr(chosen, name)
        context.session.params = with_overrides(params, {name: list(new) if isinstance(new, tuple) else new})
        if new is None:  # a form that asks for nothing
            del context.session.params[name]
    context.controller.save(context.session)
    _show_params(context, [name] if name else list(SETTABLE))


@command("stats")
def do_stats(context: CommandContext, _: str) -> None:
    """what the engine does"""
    context.show(*context.stats.lines())


@command("exit")
def do_exit(context: CommandContext, _: str) -> None:
    """leaves"""
    context.ui.exit()


def _show_params(context: CommandContext, names: list[str]) -> None:
    params = context.controller.client.params(context.session.params)
    lines = []
    for name in names:
        value = getattr(params, name)
        shown = "the rest of the context" if name == "max_tokens" and value is None else json.dumps(value)
        lines.append(f"{name:<19} {shown}" + ("" if name in context.session.params else "  (default)"))
    context.show(*lines)


def _value(name: str, text: str) -> SamplingParams:
    """Parameters with one set to what was typed: JSON, or for texts what it says."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    try:
        return SamplingParams().merged({name: value})
    except RequestError as error:
        raise UserError(str(error)) from error
