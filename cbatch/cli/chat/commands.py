"""What can be typed after a slash."""

from __future__ import annotations

import difflib
import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from cbatch.cli.chat.export import append_row, to_markdown, to_row, write_markdown
from cbatch.cli.chat.background import Background
from cbatch.cli.chat.room import RETRY_TEMPERATURE, Room
from cbatch.cli.chat.session import Session
from cbatch.cli.chat.status import Status
from cbatch.cli.chat.store import Saved, Store, read_session
from cbatch.engine import PARAM_NAMES, ConfigError, RequestError, SamplingParams

MAX_FILE_BYTES = 16 * 2**20
SETTABLE = tuple(name for name in PARAM_NAMES if name != "seed")


class Face(Protocol):
    """What commands need of the screen they were typed on."""

    def leave(self) -> None:
        """Ends the chat."""

    def put(self, text: str) -> None:
        """Puts a text into the input line."""

    def edit(self, text: str, then: Callable[[str], None]) -> None:
        """Opens a text in the user's editor, and hands on what becomes of it, if that is not nothing."""


Action = Callable[["Commands", str], None]


@dataclass(frozen=True, slots=True)
class Command:
    """usage: its arguments; argument: what Tab completes there: `session`, `file`, `saved`, `parameter`, or nothing."""

    name: str
    usage: str
    about: str
    action: Action
    argument: str = ""


COMMANDS: dict[str, Command] = {}
ALIASES = {"quit": "exit", "?": "help"}


def command(name: str, usage: str = "", argument: str = "") -> Callable[[Action], Action]:
    def register(action: Action) -> Action:
        COMMANDS[name] = Command(name, usage, (action.__doc__ or "").strip(), action, argument)
        return action

    return register


class Commands:
    """Carries commands out. What goes wrong is a ConfigError, a sentence for whoever typed them."""

    def __init__(self, room: Room, face: Face, background: Background, status: Status, store: Store) -> None:
        """`store`: where `/save` and `/load` look, also where nothing is kept by itself."""
        self.room, self.face, self.background, self.status, self.store = room, face, background, status, store
        self.listed: list[Saved] = []

    @property
    def session(self) -> Session:
        return self.room.current

    def carry_out(self, line: str) -> None:
        """Carries out a line that begins with a slash; the answer to it is a note in the current session."""
        name, _, argument = line[1:].partition(" ")
        found = COMMANDS.get(ALIASES.get(name, name))
        if found is None:
            close = difflib.get_close_matches(name, COMMANDS, 1)
            meant = f"did you mean /{close[0]}?" if close else "/help shows them."
            raise ConfigError(f"There is no command /{name}; {meant} (// at the beginning says it to the model.)")
        found.action(self, argument.strip())

    def say(self, *lines: str) -> None:
        self.session.note("\n".join(lines))

    @command("help", "[COMMAND]", "command")
    def do_help(self, name: str) -> None:
        """this list"""
        shown = [COMMANDS[name.lstrip("/")]] if name.lstrip("/") in COMMANDS else list(COMMANDS.values())
        lines = [f"/{item.name} {item.usage}".ljust(24) + f" {item.about}" for item in shown]
        keys = [
            "",
            "Enter sends, Alt-Enter begins a new line, Ctrl-X Ctrl-E opens $EDITOR on the input, Tab completes.",
            "Alt-1 to Alt-9 and Ctrl-Left, Ctrl-Right switch sessions; PageUp, PageDown scroll; Ctrl-R searches.",
            "Ctrl-C stops this session's answer; Ctrl-D at an empty line leaves.",
            "In the bar … is a session that is answering, * one with something unread.",
        ]
        self.say(*lines, *(keys if len(shown) > 1 else []))

    @command("new", "[NAME]")
    def do_new(self, name: str) -> None:
        """opens a session"""
        self.room.open(name or None)

    @command("switch", "NAME|NUMBER", "session")
    def do_switch(self, name: str) -> None:
        """goes to a session (also Alt-1 to 9, Ctrl-arrows)"""
        self.room.switch(self.room.find(name))

    @command("list")
    def do_list(self, _: str) -> None:
        """shows the sessions"""
        lines = []
        for number, session in enumerate(self.room.sessions, start=1):
            state = "answering" if session.is_busy else "unread" if session.is_unread else ""
            words = " ".join(session.turns[0].text.split())[:40] if session.turns else "empty"
            lines.append(f"{number} {session.name:<12} {len(session.turns):>3} turns  {state:<10} {words}")
        self.say(*lines)

    @command("rename", "NAME")
    def do_rename(self, name: str) -> None:
        """gives this session another name"""
        self.room.rename(self.session, name)

    @command("close", "[NAME|NUMBER]", "session")
    def do_close(self, name: str) -> None:
        """closes this session, or another"""
        self.room.close(self.room.find(name) if name else self.session)

    @command("fork", "[NAME]")
    def do_fork(self, name: str) -> None:
        """a new session from this point"""
        before = self.session
        self.room.fork(before, name or None)
        self.say(f"from here on apart from {before.name}")

    @command("all", "TEXT")
    def do_all(self, text: str) -> None:
        """says something in every session at once"""
        _need(text, "/all TEXT")
        for session in list(self.room.sessions):
            self.room.ask(session, text)

    @command("retry", "[N]")
    def do_retry(self, count: str) -> None:
        """answers again; N answers side by side"""
        number = _number(count, 1, 32) if count else 1
        if self.room.retry(self.session, number):
            self.say(f"sampled at temperature {RETRY_TEMPERATURE}; this session is greedy and would say the same")
        if number > 1:
            self.say("/pick K keeps one of them, /pick 0 the answer before; the next message keeps the first")

    @command("pick", "K")
    def do_pick(self, number: str) -> None:
        """keeps one of several answers"""
        self.room.pick(self.session, _number(number, 0, 32))

    @command("undo")
    def do_undo(self, _: str) -> None:
        """takes the last message back, into the input line"""
        self.face.put(self.room.undo(self.session))

    @command("edit")
    def do_edit(self, _: str) -> None:
        """opens the last message in $EDITOR and asks it anew"""
        session, last = self.session, self.session.last
        if last is None:
            raise ConfigError("There is no message yet.")

        def ask(text: str) -> None:
            self.room.undo(session)
            self.room.ask(session, text)

        self.face.edit(last.text, ask)

    @command("stop", "[all]")
    def do_stop(self, which: str) -> None:
        """cuts off this session's answer, or all (also Ctrl-C)"""
        sessions = list(self.room.sessions) if which == "all" else [self.session]
        stopped = [self.room.stop(session) for session in sessions]
        if not any(stopped):
            raise ConfigError("Nothing is being answered.")

    @command("continue")
    def do_continue(self, _: str) -> None:
        """goes on with an answer that was cut off"""
        self.room.go_on(self.session)

    @command("trim", "[N]")
    def do_trim(self, count: str) -> None:
        """leaves out the oldest turns, as many as are too many"""
        if gone := self.room.trim(self.session, _number(count, 1, 10**6) if count else None):
            self.say(f"the model is not shown the {gone} oldest turns any more")

    @command("system", "[TEXT|-]")
    def do_system(self, text: str) -> None:
        """sets this session's system message; - has none"""
        if text:
            self.session.system = None if text == "-" else text
        self.say(f"system message: {self.session.system or 'none'}")

    @command("set", "[NAME [VALUE]]", "parameter")
    def do_set(self, text: str) -> None:
        """shows or sets sampling parameters; `default` takes one back"""
        name, _, value = text.partition(" ")
        params = self.session.params
        if name and name not in SETTABLE:
            close = difflib.get_close_matches(name, SETTABLE, 1)
            raise ConfigError(f"There is no parameter {name}" + (f"; did you mean {close[0]}?" if close else "."))
        if value.strip() == "default":
            params.pop(name, None)
        elif value:
            chosen = _value(name, value.strip())
            params[name] = getattr(chosen, name)
            if isinstance(params[name], tuple):
                params[name] = list(params[name])
        self._show_params([name] if name else list(SETTABLE))

    @command("stats")
    def do_stats(self, _: str) -> None:
        """what the engine does"""
        self.say(*self.status.lines())

    @command("save", "[NAME]", "saved")
    def do_save(self, name: str) -> None:
        """keeps this session on disk under a name"""
        self.say(f"saved as {self.store.save(self.session, name or self.session.name)}")

    @command("load", "[NAME|NUMBER|FILE]", "saved")
    def do_load(self, which: str) -> None:
        """opens a saved session; without a name, lists them"""
        if not which:
            self.listed = self.store.saved()[:20]
            self.say(*map(_saved_line, range(1, 21), self.listed) if self.listed else ["nothing is saved yet"])
            return
        if which.isdecimal() and 1 <= int(which) <= len(self.listed):
            path = self.listed[int(which) - 1].path
        else:
            path = self.store.path_of(which)
        session = self.room.add(read_session(path))
        self.store.keeps_at(session, path)

    @command("export", "FILE.md|FILE.jsonl", "file")
    def do_export(self, name: str) -> None:
        """this session as Markdown, or as a row for cbatch run"""
        _need(name, "/export FILE.md or /export FILE.jsonl")
        path, session = Path(name).expanduser(), self.session
        driver = self.room.speaker.driver
        if session.last is None or driver is None:
            raise ConfigError("There is nothing to export yet.")
        if path.suffix == ".md":
            write_markdown(path, to_markdown(session, driver.engine.loaded.name))
        elif path.suffix == ".jsonl":
            answer = session.last.answer
            params = self.room.speaker.params(answer.params if answer else {})
            append_row(path, to_row(session, params, driver.engine.model.max_model_len))
        else:
            raise ConfigError(f"{name} ends neither in .md nor in .jsonl.")
        self.say(f"written to {path}")

    @command("run", "FILE -o OUT | stop", "file")
    def do_run(self, line: str) -> None:
        """runs a batch underneath, with the options of cbatch run"""
        driver = self.room.speaker.driver
        if line == "stop":
            if not self.background.is_running:
                raise ConfigError("No batch is running.")
            self.background.stop()
        elif driver is None:
            raise ConfigError("The model is still being loaded.")
        else:
            self.say(f"running, into {self.background.start(driver, line)}; answers here go before it")

    @command("read", "FILE", "file")
    def do_read(self, name: str) -> None:
        """puts a file's text before the next message"""
        _need(name, "/read FILE")
        try:
            with Path(name).expanduser().open("rb") as file:
                data = file.read(MAX_FILE_BYTES + 1)
            text = data.decode()
        except OSError as error:
            raise ConfigError(f"Cannot read {name}: {error.strerror}.") from error
        except UnicodeDecodeError as error:
            raise ConfigError(f"{name} is not UTF-8 text (byte {error.start + 1}).") from error
        if len(data) > MAX_FILE_BYTES:
            raise ConfigError(f"{name} is longer than {MAX_FILE_BYTES >> 20} MiB.")
        self.session.attached.append(text)
        self.say(f"{name}, {len(text):,} characters, goes before your next message")

    @command("exit")
    def do_exit(self, _: str) -> None:
        """leaves (also Ctrl-D)"""
        self.face.leave()

    def _show_params(self, names: list[str]) -> None:
        params = self.room.speaker.params(self.session.params)
        lines = []
        for name in names:
            value = getattr(params, name)
            shown = "the rest of the context" if name == "max_tokens" and value is None else json.dumps(value)
            lines.append(f"{name:<15} {shown}" + ("" if name in self.session.params else "  (default)"))
        self.say(*lines)


def _need(argument: str, usage: str) -> None:
    if not argument:
        raise ConfigError(f"Something is missing: {usage}")


def _number(text: str, low: int, high: int) -> int:
    if not text.isdecimal() or not low <= int(text[:9]) <= high:
        raise ConfigError(f"A number from {low} to {high} is needed, not {text or 'nothing'}.")
    return int(text)


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


def _saved_line(number: int, saved: Saved) -> str:
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(saved.when))
    return f"{number:>2}  {when}  {saved.name:<12} {saved.turns:>3} turns  {saved.beginning}"
