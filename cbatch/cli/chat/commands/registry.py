"""The table of slash commands, and what they act on."""

from __future__ import annotations

import difflib
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

from cbatch.cli.chat.background_run import BackgroundRun
from cbatch.cli.chat.controller import ChatController
from cbatch.cli.chat.session.session import Session
from cbatch.cli.chat.session.store import SavedSession, SessionStore
from cbatch.cli.chat.stats import ChatStats
from cbatch.cli.common.exits import UserError

ArgumentKind = Literal["", "session", "file", "files", "saved", "parameter", "command", "model"]


class CommandUI(Protocol):
    """What commands need of the screen they were typed on."""

    def exit(self) -> None:
        """Ends the chat."""

    def set_input(self, text: str) -> None:
        """Replaces the text in the input line."""

    def open_editor(self, text: str, then: Callable[[str], None]) -> None:
        """Opens a text in the user's editor. Calls `then` with the result if the user changed it."""

    def copy(self, text: str) -> None:
        """Puts a text on the clipboard. Raises UserError if the terminal cannot do that."""

    def find(self, text: str) -> None:
        """Scrolls to the next place above that holds a text; an empty one goes on. Raises UserError for none."""

    def compare(self, sessions: Sequence[Session]) -> None:
        """Shows sessions side by side; none goes back to the current one alone."""

    def show_reasoning(self, is_shown: bool) -> None:
        """Shows what models think before they reply, or folds it into a line."""


@dataclass(slots=True)
class CommandContext:
    """What commands act on.

    store:           where `/save` and `/load` look, even if nothing is saved automatically
    listed_sessions: what `/load` listed last; it also takes the numbers of that list
    searched_text:   what the sessions of that list hold
    listed_models:   what `/model` listed last; it also takes the numbers of that list
    to_delete:       what `/delete` asked about; the same command again deletes it
    batch_session:   where the last batch was started, and where it reports
    """

    controller: ChatController
    ui: CommandUI
    background: BackgroundRun
    stats: ChatStats
    store: SessionStore
    listed_sessions: list[SavedSession] = field(default_factory=list)
    searched_text: str = ""
    listed_models: list[str] = field(default_factory=list)
    to_delete: SavedSession | None = None
    batch_session: Session | None = None

    @property
    def session(self) -> Session:
        return self.controller.current

    def show(self, *lines: str) -> None:
        """Answers a command in the current session; the next command or message takes the answer away."""
        self.session.add_notice("\n".join(lines), is_passing=True)


CommandHandler = Callable[[CommandContext, str], None]


@dataclass(frozen=True, slots=True)
class Command:
    """What can be typed after a slash.

    usage:       its argument, as `/help` shows it; one that does not begin with `[` must be given
    description: its line in `/help`
    details:     what `/help NAME` adds, with an example
    argument:    what Tab completes
    """

    name: str
    usage: str
    description: str
    details: str
    handler: CommandHandler
    argument: ArgumentKind = ""


COMMANDS: dict[str, Command] = {}
"""In the order in which `/help` lists them."""

ALIASES = {"quit": "exit", "?": "help"}


def command(name: str, usage: str = "", argument: ArgumentKind = "") -> Callable[[CommandHandler], CommandHandler]:
    """Registers a function as a command. The first line of its docstring is its line in `/help`."""

    def register(handler: CommandHandler) -> CommandHandler:
        description, _, details = inspect.cleandoc(handler.__doc__ or "").partition("\n\n")
        COMMANDS[name] = Command(name, usage, description, _reflowed(details), handler, argument)
        return handler

    return register


def _reflowed(text: str) -> str:
    """A docstring with each paragraph on one line, which the screen breaks where it ends; examples stay apart."""
    lines: list[str] = []
    for line in text.splitlines():
        if lines and line and not line.startswith(("Example", " ")):
            lines[-1] += f" {line}"
        else:
            lines.append(line)
    return "\n".join(lines)


def execute_command(context: CommandContext, line: str) -> None:
    """Runs a line that begins with a slash. Raises UserError if it cannot be done."""
    name, argument = [*line[1:].split(maxsplit=1), "", ""][:2]
    found = COMMANDS.get(ALIASES.get(name, name))
    if found is None:
        close = difflib.get_close_matches(name, COMMANDS, 1)
        context.ui.set_input(line)
        hint = f"did you mean /{close[0]}?" if close else "/help lists the commands."
        raise UserError(f"There is no command /{name[:40]}; {hint} (Begin with // to send the line to the model.)")
    if not argument and found.usage and not found.usage.startswith("["):
        raise UserError(f"Something is missing: /{found.name} {found.usage} ({found.description})")
    if found.name != "delete":
        context.to_delete = None
    found.handler(context, argument.strip())


def parse_number(text: str, low: int, high: int) -> int:
    """A number that was typed. Raises UserError if it is not one from `low` to `high`."""
    if not (text.isascii() and text.isdecimal() and len(text) < 10 and low <= int(text) <= high):
        raise UserError(f"Type a number from {low} to {high}, not {text or 'nothing'}.")
    return int(text)
