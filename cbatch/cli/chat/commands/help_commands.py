"""`/help`: the commands, the keys, and what one command does."""

from __future__ import annotations

import difflib

from cbatch.cli.chat.commands.registry import ALIASES, COMMANDS, Command, CommandContext, command
from cbatch.cli.common.exits import UserError

NAME_WIDTH, COLUMN_WIDTH = 10, 39
"""Two columns of commands fit a screen of 80 cells."""

KEYS = (
    ("Enter", "sends; in a menu it takes the entry"),
    ("Ctrl-J, \\ Enter, Alt-Enter", "begin a new line"),
    ("Esc", "stops the reply; closes a menu or a comparison"),
    ("Ctrl-C", "stops the reply; else clears the line"),
    ("Ctrl-D", "leaves, on an empty line"),
    ("Tab", "completes commands, names and files"),
    ("Up, Down, Ctrl-R", "what was typed before; searches it"),
    ("Ctrl-Left, Ctrl-Right", "move by a word"),
    ("Alt-Left, Alt-Right", "go to the previous or next session"),
    ("Alt-1 … Alt-9", "go to a session by its number"),
    ("PageUp, PageDown, wheel", "scroll"),
    ("Home, End", "on an empty line: go to the beginning or end"),
    ("1 … 9, Left, Right, Enter", "on an empty line: pick one of several replies"),
    ("Ctrl-T", "shows or folds what a model thinks"),
    ("Ctrl-X Ctrl-E", "opens the line in $EDITOR"),
    ("Ctrl-L, Ctrl-Z", "draw the screen anew; suspend"),
    ("Shift and the mouse", "select text; --no-mouse leaves the mouse alone"),
)
"""Keys, and what they do. All others are those of an Emacs-like line editor, or of vi with --vi."""


@command("help", "[NAME|keys]", "command")
def do_help(context: CommandContext, name: str) -> None:
    """list the commands

    /help NAME explains a command, /help keys lists the keys.
    Example: /help retry
    """
    name = name.lstrip("/")
    if name == "keys":
        context.show(*(f"{keys:<27} {action}" for keys, action in KEYS))
    elif not name:
        context.show(*_all_commands(), "/help NAME explains a command and gives an example; /help keys lists the keys.")
    elif found := COMMANDS.get(ALIASES.get(name, name)):
        context.show(f"/{found.name} {found.usage}".rstrip(), f"{found.description}.", found.details)
    else:
        close = difflib.get_close_matches(name, [*COMMANDS, "keys"], 1)
        hint = f"did you mean /help {close[0]}?" if close else "/help lists all of them."
        raise UserError(f"There is no command /{name[:40]}; {hint}")


def _all_commands() -> list[str]:
    """Two columns, read downwards, so that all fit on a screen of 24 lines."""
    shown = list(COMMANDS.values())
    height = (len(shown) + 1) // 2
    rows = []
    for number in range(height):
        right = _line(shown[number + height]) if number + height < len(shown) else ""
        rows.append(_line(shown[number]).ljust(COLUMN_WIDTH) + right)
    return [row.rstrip() for row in rows]


def _line(item: Command) -> str:
    return f"/{item.name}".ljust(NAME_WIDTH) + item.description
