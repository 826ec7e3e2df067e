"""The table of slash commands: what they act on, how they are run, and what Tab completes."""

from __future__ import annotations

import difflib
import inspect
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from itertools import islice
from pathlib import Path
from threading import Thread
from typing import TYPE_CHECKING, Any, Literal

from prompt_toolkit.application import get_app
from prompt_toolkit.completion import CompleteEvent, Completer, Completion, PathCompleter
from prompt_toolkit.document import Document

from cbatch.base.errors import RequestError, os_errors_as
from cbatch.base.params import PARAM_NAMES, PARAMS, SamplingParams
from cbatch.cli.chat.background_run import BackgroundRun
from cbatch.cli.chat.controller import ChatController
from cbatch.cli.chat.engine_client import num_tokens, room_beside, takes_messages
from cbatch.cli.chat.pictures import leading_pictures, read_attachment
from cbatch.cli.chat.session.files import as_path, is_file, quoted
from cbatch.cli.chat.session.session import Attachment, Session
from cbatch.cli.chat.session.store import SessionStore, has_own_name
from cbatch.cli.chat.shell import ShellCommand
from cbatch.cli.chat.stats import ChatStats
from cbatch.cli.common.console import safe
from cbatch.cli.common.exits import UserError
from cbatch.cli.common.local_models import local_models
from cbatch.cli.common.options import RUN_ONLY_PARAMS
from cbatch.requests.param_names import own_params

if TYPE_CHECKING:
    from cbatch.api import Engine
    from cbatch.cli.chat.screen import TranscriptView

SETTABLE = ("seed", *(name for name in PARAM_NAMES if name not in ("seed", *RUN_ONLY_PARAMS)))
"""The parameters that `/set` knows."""


def parse_parameter(name: str, text: str) -> dict[str, Any]:
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


MOST_OFFERED = 50
"""Saved sessions that Tab offers, the newest ones: they are read for that."""

SHOWN_LINES = 8
"""Lines of a shell command's output that the screen shows."""

ArgumentKind = Literal["", "session", "file", "files", "saved", "stored", "parameter", "command", "model"]


class FrontEnd:
    """A terminal on which somebody chats, as commands see it.

    store:           where `/save` and `/load` look, even if nothing is saved automatically
    listed_sessions: what `/load` listed last; it also takes the numbers of that list
    searched_text:   what the sessions of that list hold
    listed_models:   the same of `/model`
    asked:           what a command asked about; the same command again does it
    batch_session:   where the last batch was started, and where it reports
    shell:           the user's command that runs
    screen:          where the sessions are shown
    """

    screen: TranscriptView

    def __init__(
        self, controller: ChatController, store: SessionStore, background: BackgroundRun | None = None
    ) -> None:
        """`background`: runs batches; None: on the chat's own engine alone"""
        self.controller, self.store = controller, store
        self.background = background or BackgroundRun()
        self.stats = ChatStats(controller)
        self.listed_sessions: list[Session] = []
        self.searched_text = ""
        self.listed_models: list[str] = []
        self.asked: tuple[str, Path] | None = None
        self.batch_session: Session | None = None
        self.shell: ShellCommand | None = None

    @property
    def session(self) -> Session:
        return self.controller.current

    @property
    def engine(self) -> Engine:
        """The one that replies in the current session. Raises UserError while it is loaded."""
        return self.controller.client_of(self.session).require_engine()

    def show(self, *lines: str) -> None:
        """Answers a command in the current session; the next command or message takes the answer away."""
        self.session.add_notice("\n".join(lines), is_passing=True)

    def run_shell(self, line: str) -> None:
        """Runs a line in the shell, and attaches what it writes to the session's next message."""
        if self.shell is not None:
            raise UserError("A command is running; Esc or Ctrl-C stops it.")
        if not line:
            raise UserError("Type a command of the shell after the exclamation mark.")
        session = self.session
        with os_errors_as(UserError, "Cannot start a shell"):
            shell = self.shell = ShellCommand(line)
        session.add_notice(f"running {line}", is_passing=True)

        def attach(text: str, what: str) -> None:
            self.shell = None
            if text:
                self.attach(session, Attachment(f"$ {line}", text))
                what += "; it goes with your next message, /detach takes it away"
            session.clear_passing_notices()
            shown = "\n".join(islice(text.splitlines(), SHOWN_LINES))
            session.add_notice(f"{line}: {what}\n{shown}".rstrip(), is_passing=True)

        def run() -> None:
            output = shell.output()
            self.controller.client.post(partial(attach, *output))

        Thread(target=run, name="cbatch-shell", daemon=True).start()

    def stop_shell(self) -> bool:
        """Stops the shell. Returns whether it was running."""
        if self.shell is not None:
            self.shell.stop()
        return self.shell is not None

    def confirms(self, command: str, path: Path) -> bool:
        """Whether the same command was given just before, which is how a question is answered with yes."""
        is_answer = self.asked == (command, path)
        self.asked = None if is_answer else (command, path)
        return is_answer

    def attach(self, session: Session, file: Attachment) -> None:
        """Attaches a file to a session's next message, in the place of one of the same name. Raises UserError."""
        engine = self.controller.client_of(session).engine
        if file.digest and engine is not None and (isinstance(engine.loaded.vision, str) or not takes_messages(engine)):
            raise UserError(f"{engine.loaded.name} takes no images; /model NAME lets a model reply that does.")
        session.attached = [other for other in session.attached if other.name != file.name] + [file]
        self.measure(session, file)

    def attach_dropped(self, line: str) -> str:
        """Attaches the pictures whose paths a line begins with. Returns what follows them. Raises as `attach` does."""
        dropped, rest = leading_pictures(line)
        for path in dropped:
            self.attach(self.session, read_attachment(path))
        return rest

    def measure(self, session: Session, file: Attachment) -> None:
        """Has the tokens of what is attached counted, and says at once if it does not fit."""
        client, messages = self.controller.client_of(session), session.messages_with("")
        params, others = client.params(session.params), [one for one in session.attached if one is not file]

        def on_count(found: tuple[int, int]) -> None:
            file.num_tokens, room = found
            room = max(room - sum(one.num_tokens or 0 for one in others), 0)
            if file.num_tokens > room:
                way = "/fit attaches its beginning and end" if room else "/trim N makes room"
                way = "Backspace takes it away" if file.is_paste else "/detach takes it away" if file.digest else way
                text = f"{file.label}, does not fit: there is room for {room:,} beside a reply. {way}."
                session.add_notice(text, is_error=True, is_passing=True)

        client.compute(lambda engine: (num_tokens(engine, file), room_beside(engine, messages, params)), on_count)

    def close(self) -> None:
        """Stops all replies and the batch, and saves what is left."""
        self.stop_shell()
        self.controller.end_all()
        self.store.close()
        self.background.close()

    def exit(self) -> None:
        """Ends the chat."""
        raise NotImplementedError

    def set_input(self, text: str) -> None:
        """Replaces the text in the input line."""
        raise NotImplementedError

    @property
    def columns(self) -> int:
        """Cells of a line on the terminal."""
        return get_app().output.get_size().columns

    def open_editor(self, text: str, then: Callable[[str], None]) -> None:
        """Opens a text in the user's editor. Calls `then` with the result if the user changed it."""
        raise NotImplementedError

    def copy(self, text: str) -> None:
        """Puts a text on the clipboard."""
        raise NotImplementedError


CommandHandler = Callable[[FrontEnd, str], None]


@dataclass(frozen=True, slots=True)
class Command:
    """A command after a slash, with its line in `/help` and the `details` that `/help NAME` adds.

    usage:    its argument, as `/help` shows it; one that does not begin with `[` must be given
    argument: what Tab completes
    """

    name: str
    usage: str
    description: str
    details: str
    handler: CommandHandler
    argument: ArgumentKind = ""


COMMANDS: dict[str, Command] = {}
"""In the order in which `/help` lists them."""

ALIASES = {"attach": "read", "quit": "exit", "?": "help"}


def command(name: str, usage: str = "", argument: ArgumentKind = "") -> Callable[[CommandHandler], CommandHandler]:
    """Registers a function as a command. The first line of its docstring is its line in `/help`."""

    def register(handler: CommandHandler) -> CommandHandler:
        description, _, details = inspect.cleandoc(handler.__doc__ or "").partition("\n\n")
        # Each paragraph on one line, which the screen breaks where it ends; examples stay apart.
        details = re.sub(r"(?<=[^\n])\n(?!\n|Example| )", " ", details)
        COMMANDS[name] = Command(name, usage, description, details, handler, argument)
        return handler

    return register


def did_you_mean(name: str, known: Iterable[str], prefix: str = "") -> str:
    """A question that names the most similar one that is known; empty if none is."""
    close = difflib.get_close_matches(name, list(known), 1)
    return f"did you mean {prefix}{close[0]}?" if close else ""


_COMMAND = re.compile(r"/[^\s/]*(?:\s.*)?", re.DOTALL)
"""A second slash makes it a path, with which a message begins."""


def is_message(line: str) -> bool:
    """Whether a line is neither a command nor one for the shell; two slashes or exclamation marks stand for one."""
    return line.startswith("!!") or not (line.startswith("!") or _COMMAND.fullmatch(line))


def files_in(message: str) -> list[Attachment]:
    """The files that a message names after an `@`. Raises UserError if one of them cannot be read."""
    names = (_ESCAPED.sub(r"\1", name) for name in _MENTION.findall(message))
    found = (one for name in names for one in (name, name.rstrip(".,;:!?)")) if is_file(one))
    return [read_attachment(as_path(name)) for name in dict.fromkeys(found)]


def execute_line(chat: FrontEnd, line: str) -> None:
    """Runs a command, or sends a message to the current session. Raises UserError if it cannot be done."""
    given, line = line, chat.attach_dropped(line)
    if not line:
        return
    if line != given or is_message(line):
        chat.asked = None
        message = line[1:] if line.startswith(("//", "!!")) else line
        for file in files_in(message):
            chat.attach(chat.session, file)
        chat.controller.send(chat.session, message)
        return
    line = line if line.startswith("/all ") else chat.session.unfold(line)
    if line.startswith("!"):
        chat.run_shell(line[1:].strip())
        return
    name, argument = [*line[1:].split(maxsplit=1), "", ""][:2]
    found = COMMANDS.get(ALIASES.get(name, name))
    if found is None:
        chat.set_input(line)
        hint = did_you_mean(name, COMMANDS, "/") or "/help lists the commands."
        raise UserError(f"There is no command /{name[:40]}; {hint} (Begin with // to send the line to the model.)")
    if not argument and found.usage and not found.usage.startswith("["):
        raise UserError(f"Something is missing: /{found.name} {found.usage} ({found.description})")
    if chat.asked is not None and chat.asked[0] != found.name:
        chat.asked = None
    found.handler(chat, argument.strip())


def parse_number(text: str, low: int, high: int) -> int:
    """A number that was typed. Raises UserError if it is not one from `low` to `high`."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and low <= int(text) <= high):
        raise UserError(f"Type a number from {low} to {high}, not {text or 'nothing'}.")
    return int(text)


_LAST_NAME = re.compile(r"""(?:\\.|'[^']*'?|"[^"]*"?|[^\s\\'"])*\\?$""")
"""The part of a line that a shell would take as the last, unfinished word."""

_ESCAPED = re.compile(r"\\(.)")

_MENTION = re.compile(r"(?<!\S)@((?:\\.|[^\s\\])+)")
_OPEN_MENTION = re.compile(r"(?<!\S)@((?:\\.|[^\s\\])*)$")
"""A file in a message, with a backslash before each blank of its name; and one that is still being typed."""


class CommandCompleter(Completer):
    """Completes a line that begins with a slash, and names of files after an `@`."""

    def __init__(self, controller: ChatController, store: SessionStore) -> None:
        self._controller, self._store = controller, store
        self._paths = PathCompleter(expanduser=True)

    def get_completions(self, document: Document, complete_event: CompleteEvent) -> Iterable[Completion]:
        text = document.text_before_cursor
        if mention := _OPEN_MENTION.search(text):
            yield from self._files(mention[1], complete_event)
            return
        if not text.startswith("/") or "\n" in text:
            return
        name, space, rest = text[1:].partition(" ")
        if not space:
            for each in [*COMMANDS, *(ALIASES if name else ())]:
                if each.startswith(name):
                    about = COMMANDS[ALIASES.get(each, each)].description
                    yield Completion(each, -len(name), display_meta=about)
        elif found := COMMANDS.get(ALIASES.get(name, name)):
            yield from self._arguments(found.argument, rest, complete_event)

    def _arguments(self, kind: ArgumentKind, rest: str, complete_event: CompleteEvent) -> Iterable[Completion]:
        if kind in ("file", "files"):
            whole = list(self._files(rest, complete_event))  # a name with blanks that are not marked, or the only one
            yield from whole or self._files(_LAST_NAME.findall(rest)[0], complete_event)
            return
        if kind == "stored" and ("/" in rest or rest.startswith("~")):
            yield from self._files(rest, complete_event)
        elif kind == "stored":
            for saved in islice(self._store.saved_sessions(), MOST_OFFERED):
                assert saved.path is not None
                name, words = saved.path.stem, f"{saved.path.stem}\n{saved.title}".casefold()
                if rest.casefold() in words:
                    yield Completion(name, -len(rest), display=saved.title, display_meta=saved.name)
        before, _, word = rest.lstrip().rpartition(" ")
        if not before or kind == "session" or (kind == "parameter" and before.strip() == "all"):
            for each in self._names(kind):
                if each.startswith(word):
                    about = PARAMS[each].help if kind == "parameter" and each in PARAMS else ""
                    yield Completion(each, -len(word), display_meta=about)

    def _files(self, typed: str, complete_event: CompleteEvent) -> Iterable[Completion]:
        """Files whose names begin as the last one that was typed, with a backslash before each blank."""
        name = _ESCAPED.sub(r"\1", typed).lstrip("'\"")
        for found in self._paths.get_completions(Document(name), complete_event):
            if found.text.isprintable() and safe(found.text) == found.text:
                whole = name + found.text
                end = "/" if Path(whole).expanduser().is_dir() else ""
                yield Completion(quoted(whole) + end, -len(typed), display=found.display)

    def _names(self, kind: ArgumentKind) -> list[str]:
        if kind == "session":
            return [session.name for session in self._controller.sessions]
        if kind == "saved":
            return sorted(path.stem for path in self._store.files() if has_own_name(path))
        if kind == "model":
            names = (model.name for model in local_models())
            return list(dict.fromkeys([*self._controller.model_names[1:], *names]))
        return {"parameter": ["all", *SETTABLE], "command": [*COMMANDS, "keys"]}.get(kind, [])
