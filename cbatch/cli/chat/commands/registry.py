"""Where commands are carried out: what they act upon, and the table they stand in."""

from __future__ import annotations

import difflib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from cbatch.cli.chat.background_run import BackgroundRun
from cbatch.cli.chat.controller import ChatController
from cbatch.cli.chat.session.session import Session
from cbatch.cli.chat.session.store import SavedSession, SessionStore
from cbatch.cli.chat.stats import ChatStats
from cbatch.cli.common.exits import UserError


class CommandUI(Protocol):
    """What commands need of the screen they were typed on."""

    def exit(self) -> None:
        """Ends the chat."""

    def set_input(self, text: str) -> None:
        """Puts a text into the input line."""

    def open_editor(self, text: str, then: Callable[[str], None]) -> None:
        """Opens a text in the user's editor, and hands on what becomes of it, if that is not nothing."""


@dataclass(slots=True)
class CommandContext:
    """What commands act upon.

    store:  where `/save` and `/load` look, also where nothing is kept by itself
    listed: what `/load` has shown last, whose numbers it takes
    """

    controller: ChatController
    ui: CommandUI
    background: BackgroundRun
    stats: ChatStats
    store: SessionStore
    listed_sessions: list[SavedSession] = field(default_factory=list)

    @property
    def session(self) -> Session:
        return self.controller.current

    def show(self, *lines: str) -> None:
        """Answers with a note in the current session."""
        self.session.add_notice("\n".join(lines))


CommandHandler = Callable[[CommandContext, str], None]


@dataclass(frozen=True, slots=True)
class Command:
    """What can be typed after a slash.

    usage:    its arguments, as help shows them
    argument: what Tab completes there: `session`, `file`, `saved`, `parameter`, `command`, or nothing
    """

    name: str
    usage: str
    description: str
    handler: CommandHandler
    argument: str = ""


COMMANDS: dict[str, Command] = {}
ALIASES = {"quit": "exit", "?": "help"}


def command(name: str, usage: str = "", argument: str = "") -> Callable[[CommandHandler], CommandHandler]:
    """Puts a function into the table; its docstring is its help."""

    def register(handler: CommandHandler) -> CommandHandler:
        COMMANDS[name] = Command(name, usage, (handler.__doc__ or "").strip(), handler, argument)
        return handler

    return register


def execute_command(context: CommandContext, line: str) -> None:
    """Does what a line says that begins with a slash. Raises UserError, a sentence for whoever typed it."""
    name, argument = [*line[1:].split(maxsplit=1), "", ""][:2]
    found = COMMANDS.get(ALIASES.get(name, name))
    if found is None:
        close = difflib.get_close_matches(name, COMMANDS, 1)
        context.ui.set_input(line)
        meant = f"did you mean /{close[0]}?" if close else "/help shows them."
        raise UserError(f"There is no command /{name[:40]}; {meant} (// at the beginning says it to the model.)")
    found.handler(context, argument.strip())


def require_argument(argument: str, usage: str) -> None:
    """Raises UserError where nothing was given."""
    if not argument:
        raise UserError(f"Something is missing: {usage}")


def parse_number(text: str, low: int, high: int) -> int:
    """A number that was typed. Raises UserError where it is none, or out of range."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and low <= int(text) <= high):
        raise UserError(f"A number from {low} to {high} is needed, not {text or 'nothing'}.")
    return int(text)


def format_turn_count(turns: int) -> str:
    """How many turns, for a column."""
    return f"{turns:>3} turn{' ' if turns == 1 else 's'}"
