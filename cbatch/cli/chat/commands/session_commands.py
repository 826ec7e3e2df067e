"""Commands about sessions, their turns and their settings."""

from __future__ import annotations

import difflib
import json
from typing import Any

from cbatch.cli.chat.commands.registry import COMMANDS, Desk, command, counted, need, number_in
from cbatch.cli.chat.controller import RETRY_TEMPERATURE
from cbatch.cli.common.options import RUN_ONLY_PARAMS
from cbatch.engine import PARAM_NAMES, ConfigError, RequestError, SamplingParams, with_overrides

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
def do_help(desk: Desk, name: str) -> None:
    """this list"""
    if name and name.lstrip("/") not in COMMANDS:
        raise ConfigError(f"There is no command /{name.lstrip('/')[:40]}; /help alone shows them all.")
    shown = [COMMANDS[name.lstrip("/")]] if name.lstrip("/") in COMMANDS else list(COMMANDS.values())
    lines = [
        f"/{item.name} {item.usage}".ljust(25) + f" {item.about}" for item in sorted(shown, key=lambda item: item.name)
    ]
    desk.say(*lines, *(KEYS if len(shown) > 1 else []))


@command("new", "[NAME]")
def do_new(desk: Desk, name: str) -> None:
    """opens a session"""
    desk.room.open(name or None)


@command("switch", "NAME|NUMBER", "session")
def do_switch(desk: Desk, name: str) -> None:
    """goes to a session"""
    need(name, "/switch NAME or /switch NUMBER")
    desk.room.switch(desk.room.find(name))


@command("list")
def do_list(desk: Desk, _: str) -> None:
    """shows the sessions"""
    lines = []
    for number, session in enumerate(desk.room.sessions, start=1):
        state = "answering" if session.is_busy else "unread" if session.is_unread else ""
        words = " ".join(session.turns[0].text.split())[:40] if session.turns else "empty"
        lines.append(f"{number} {session.name:<12} {counted(len(session.turns))}  {state:<10} {words}")
    desk.say(*lines)


@command("rename", "NAME")
def do_rename(desk: Desk, name: str) -> None:
    """gives this session another name"""
    need(name, "/rename NAME")
    desk.room.rename(desk.session, name)


@command("close", "[NAME|NUMBER]", "session")
def do_close(desk: Desk, name: str) -> None:
    """closes this session, or another"""
    desk.room.close(desk.room.find(name) if name else desk.session)


@command("fork", "[NAME]")
def do_fork(desk: Desk, name: str) -> None:
    """a new session from this point"""
    before = desk.session
    desk.room.fork(before, name or None)
    desk.say(f"from here on apart from {before.name}")


@command("all", "TEXT")
def do_all(desk: Desk, text: str) -> None:
    """says something in every session at once"""
    need(text, "/all TEXT")
    for session in list(desk.room.sessions):
        desk.room.ask(session, text)


@command("retry", "[N]")
def do_retry(desk: Desk, count: str) -> None:
    """answers again; N answers side by side"""
    number = number_in(count, 1, 32) if count else 1
    first = desk.room.retry(desk.session, number)
    if desk.room.is_greedy(desk.session):
        desk.say(f"sampled at temperature {RETRY_TEMPERATURE}; this session is greedy and would say the same")
    before = desk.session.last.fallback if desk.session.last is not None else 0
    if number > 1:
        desk.say(f"/pick K keeps one of {first} to {first + number - 1}, or {before}, which is the answer before")
    else:
        desk.say(f"/pick {before} takes the answer before back")


@command("pick", "K")
def do_pick(desk: Desk, number: str) -> None:
    """keeps one of several answers"""
    need(number, "/pick K")
    desk.room.pick(desk.session, number_in(number, 0, 10**6))


@command("undo")
def do_undo(desk: Desk, _: str) -> None:
    """takes the last message back, into the input line"""
    desk.face.put(desk.room.undo(desk.session))


@command("edit")
def do_edit(desk: Desk, _: str) -> None:
    """the last message in $EDITOR, asked anew"""
    session, last = desk.session, desk.session.last
    if last is None:
        raise ConfigError("There is no message yet.")

    def ask(text: str) -> None:
        try:
            desk.room.replace(session, last, text)
        except ConfigError:
            desk.face.put(text)
            raise

    desk.face.edit(last.text, ask)


@command("stop", "[all]")
def do_stop(desk: Desk, which: str) -> None:
    """cuts off this session's answer, or all"""
    sessions = list(desk.room.sessions) if which == "all" else [desk.session]
    stopped = [desk.room.stop(session) for session in sessions]
    if not any(stopped):
        raise ConfigError("Nothing is being answered.")


@command("continue")
def do_continue(desk: Desk, _: str) -> None:
    """goes on with an answer that was cut off"""
    desk.room.go_on(desk.session)


@command("trim", "[N]")
def do_trim(desk: Desk, count: str) -> None:
    """leaves out the oldest turns"""
    wanted = number_in(count, 1, 10**6) if count else None
    gone = desk.room.trim(desk.session, wanted)
    if wanted is not None:
        desk.say(f"the model is not shown the {gone} oldest turns any more" if gone else "there is no older turn to go")


@command("system", "[TEXT|-]")
def do_system(desk: Desk, text: str) -> None:
    """the system message; - takes it away"""
    if text:
        desk.session.system = None if text == "-" else text
        desk.room.keep(desk.session)
    desk.say(f"system message: {desk.session.system or 'none'}")


@command("set", "[NAME [VALUE]]", "parameter")
def do_set(desk: Desk, text: str) -> None:
    """sampling parameters; `default` takes one back"""
    name, _, value = text.partition(" ")
    params = desk.session.params
    if name and name not in SETTABLE:
        close = difflib.get_close_matches(name, SETTABLE, 1)
        raise ConfigError(f"There is no parameter {name}" + (f"; did you mean {close[0]}?" if close else "."))
    if value.strip() in ("default", "null"):
        params.pop(name, None)
    elif value:
        chosen = _value(name, value.strip())
        new = getattr(chosen, name)
        desk.session.params = with_overrides(params, {name: list(new) if isinstance(new, tuple) else new})
        if new is None:  # a form that asks for nothing
            del desk.session.params[name]
    desk.room.keep(desk.session)
    _show_params(desk, [name] if name else list(SETTABLE))


@command("stats")
def do_stats(desk: Desk, _: str) -> None:
    """what the engine does"""
    desk.say(*desk.status.lines())


@command("exit")
def do_exit(desk: Desk, _: str) -> None:
    """leaves"""
    desk.face.leave()


def _show_params(desk: Desk, names: list[str]) -> None:
    params = desk.room.client.params(desk.session.params)
    lines = []
    for name in names:
        value = getattr(params, name)
        shown = "the rest of the context" if name == "max_tokens" and value is None else json.dumps(value)
        lines.append(f"{name:<19} {shown}" + ("" if name in desk.session.params else "  (default)"))
    desk.say(*lines)


def _value(name: str, text: str) -> SamplingParams:
    """Parameters with one set to what was typed: JSON, or for texts what it says."""
    try:
        value: Any = json.loads(text)
    except (ValueError, RecursionError):
        value = text
    try:
        return SamplingParams().merged({name: value})
    except RequestError as error:
        raise ConfigError(str(error)) from error
