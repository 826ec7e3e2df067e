"""Commands for sessions, their turns and their settings."""

from __future__ import annotations

import difflib
import json
from typing import Any

from cbatch.cli.chat.commands.registry import COMMANDS, CommandContext, command, format_turn_count, parse_number
from cbatch.cli.chat.controller import RETRY_TEMPERATURE
from cbatch.cli.common.exits import UserError
from cbatch.cli.common.options import RUN_ONLY_PARAMS
from cbatch.engine import PARAM_NAMES, RequestError, SamplingParams, own_params, with_overrides

SETTABLE = tuple(name for name in PARAM_NAMES if name not in ("seed", *RUN_ONLY_PARAMS))

KEYS_HELP = (
    "",
    "Enter sends            Alt-Enter starts a new line    Ctrl-X Ctrl-E: $EDITOR",
    "Alt-1 … 9, Ctrl-Left and Ctrl-Right switch sessions   PageUp, PageDown scroll",
    "Tab completes          Ctrl-R searches what you typed",
    "Ctrl-C stops the reply in this session                Ctrl-D leaves",
    "In the bar, … marks a session that is replying, * one with something unread.",
)


@command("help", "[COMMAND]", "command")
def do_help(context: CommandContext, name: str) -> None:
    """list the commands"""
    name = name.lstrip("/")
    if name and name not in COMMANDS:
        raise UserError(f"There is no command /{name[:40]}; /help lists all of them.")
    shown = [COMMANDS[name]] if name else sorted(COMMANDS.values(), key=lambda item: item.name)
    lines = [f"/{item.name} {item.usage}".ljust(25) + f" {item.description}" for item in shown]
    context.show(*lines, *(() if name else KEYS_HELP))


@command("new", "[NAME]")
def do_new(context: CommandContext, name: str) -> None:
    """open a new session"""
    context.controller.new_session(name or None)


@command("switch", "NAME|NUMBER", "session")
def do_switch(context: CommandContext, name: str) -> None:
    """go to a session"""
    context.controller.switch(context.controller.find(name))


@command("list")
def do_list(context: CommandContext, _: str) -> None:
    """list the open sessions"""
    lines = []
    for number, session in enumerate(context.controller.sessions, start=1):
        state = "replying" if session.is_busy else "unread" if session.is_unread else ""
        words = " ".join(session.turns[0].text.split())[:40] if session.turns else "empty"
        lines.append(f"{number} {session.name:<12} {format_turn_count(len(session.turns))}  {state:<10} {words}")
    context.show(*lines)


@command("rename", "NAME")
def do_rename(context: CommandContext, name: str) -> None:
    """rename this session"""
    context.controller.rename(context.session, name)


@command("close", "[NAME|NUMBER]", "session")
def do_close(context: CommandContext, name: str) -> None:
    """close this session, or another one"""
    context.controller.close(context.controller.find(name) if name else context.session)


@command("fork", "[NAME]")
def do_fork(context: CommandContext, name: str) -> None:
    """copy this session into a new one"""
    before = context.session
    context.controller.fork(before, name or None)
    context.show(f"forked from {before.name}")


@command("all", "TEXT")
def do_all(context: CommandContext, text: str) -> None:
    """send a message to every session"""
    for session in list(context.controller.sessions):
        context.controller.send(session, text)


@command("retry", "[N]")
def do_retry(context: CommandContext, count: str) -> None:
    """ask again; N gives N replies to choose from"""
    number = parse_number(count, 1, 32) if count else 1
    first = context.controller.retry(context.session, number)
    if context.controller.is_greedy(context.session):
        context.show(f"sampled at temperature {RETRY_TEMPERATURE}; this session is greedy and would repeat itself")
    before = context.session.last.fallback if context.session.last is not None else 0
    choice = f"/pick K keeps reply K ({first} to {first + number - 1}); " if number > 1 else ""
    context.show(f"{choice}/pick {before} goes back to the previous reply")


@command("pick", "K")
def do_pick(context: CommandContext, number: str) -> None:
    """keep one of several replies"""
    context.controller.pick(context.session, parse_number(number, 0, 10**6))


@command("undo")
def do_undo(context: CommandContext, _: str) -> None:
    """take the last message back into the input line"""
    context.ui.set_input(context.controller.undo(context.session))


@command("edit")
def do_edit(context: CommandContext, _: str) -> None:
    """edit the last message in $EDITOR and send it again"""
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
    """stop the reply in this session, or all replies"""
    sessions = list(context.controller.sessions) if which == "all" else [context.session]
    stopped = [context.controller.stop(session) for session in sessions]
    if not any(stopped):
        raise UserError("No reply is coming.")


@command("continue")
def do_continue(context: CommandContext, _: str) -> None:
    """resume a reply that was cut off"""
    context.controller.continue_reply(context.session)


@command("trim", "[N]")
def do_trim(context: CommandContext, argument: str) -> None:
    """drop the oldest turns from the context"""
    wanted = parse_number(argument, 1, 10**6) if argument else None
    count = context.controller.trim(context.session, wanted)
    if wanted is not None:
        turns = "the oldest turn" if count == 1 else f"the {count} oldest turns"
        context.show(f"the model no longer sees {turns}" if count else "there is no older turn to drop")


@command("system", "[TEXT|-]")
def do_system(context: CommandContext, text: str) -> None:
    """show or set the system message; - removes it"""
    if text:
        context.session.system = None if text == "-" else text
        context.controller.save(context.session)
    context.show(f"system message: {context.session.system or 'none'}")


@command("set", "[NAME [VALUE]]", "parameter")
def do_set(context: CommandContext, text: str) -> None:
    """show or set sampling parameters; default resets one"""
    name, _, value = text.partition(" ")
    params = context.session.params
    if value and value.strip() not in ("default", "null"):
        given = _parse_params(name, value.strip())
        made = SamplingParams().merged(given)
        for own in given:
            new = getattr(made, own)
            context.session.params = params = with_overrides(
                params, {own: list(new) if isinstance(new, tuple) else new}
            )
            if new is None:  # a constraint that asks for nothing
                del params[own]
        _save_and_show(context, list(given))
        return
    if name and name not in SETTABLE:
        close = difflib.get_close_matches(name, SETTABLE, 1)
        raise UserError(f"There is no parameter {name}" + (f"; did you mean {close[0]}?" if close else "."))
    if value:
        params.pop(name, None)
    _save_and_show(context, [name] if name else list(SETTABLE))


def _save_and_show(context: CommandContext, names: list[str]) -> None:
    context.controller.save(context.session)
    _show_params(context, names)


@command("stats")
def do_stats(context: CommandContext, _: str) -> None:
    """show what the engine is doing"""
    context.show(*context.stats.lines())


@command("exit")
def do_exit(context: CommandContext, _: str) -> None:
    """leave the chat"""
    context.ui.exit()


def _show_params(context: CommandContext, names: list[str]) -> None:
    params = context.controller.client.params(context.session.params)
    lines = []
    for name in names:
        value = getattr(params, name)
        shown = "the rest of the context" if name == "max_tokens" and value is None else json.dumps(value)
        lines.append(f"{name:<19} {shown}" + ("" if name in context.session.params else "  (default)"))
    context.show(*lines)


def _parse_params(name: str, text: str) -> dict[str, Any]:
    """A parameter set to what was typed, JSON or else a plain string; under our name, also if it has another one."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    try:
        given, template = own_params({name: value})
        SamplingParams().merged(given)
    except RequestError as error:
        raise UserError(str(error)) from error
    if template:
        raise UserError(f"{name} is for the chat template: cbatch chat --template-kwargs sets it for all sessions.")
    if strange := [own for own in given if own not in SETTABLE]:
        raise UserError(f"{strange[0]} cannot be set in a chat.")
    return given
