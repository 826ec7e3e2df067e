"""Commands for sessions on disk."""

from __future__ import annotations

import time
from collections.abc import Iterable
from contextlib import suppress
from itertools import islice
from pathlib import Path

from cbatch.base.units import format_count
from cbatch.cli.chat.commands.registry import CommandContext, command
from cbatch.cli.chat.session.files import one_name
from cbatch.cli.chat.session.session_file import read_session
from cbatch.cli.chat.session.store import SavedSession
from cbatch.cli.common.exits import UserError

PAGE = 15
"""Sessions that `/load` lists at once; they fit a screen of 24 lines."""


@command("save", "[NAME]", "saved")
def do_save(context: CommandContext, name: str) -> None:
    """save under a name

    Sessions are saved anyway; a name makes one easy to find again. A name with a slash, or one that ends in .json, is
    a path.
    Example: /save recipes
    """
    name = one_name(name)
    if not name and context.store.has_own_name(context.session):
        name = str(context.store.saved_path(context.session))
    path = context.store.save_as(context.session, name or context.session.name)
    if path.parent == context.store.sessions_folder and path.stem != context.session.name:
        with suppress(UserError):  # it is more than one word, or another session's name
            context.controller.rename(context.session, path.stem)
            context.store.save_as(context.session, str(path))
    is_kept = context.controller.store is not None
    later = "and kept up to date there" if is_kept else "as it is now; with --no-history it is not kept up to date"
    context.show(f"saved as {path}, {later}")


@command("load", "[NAME|NUMBER|FILE|TEXT]", "saved")
def do_load(context: CommandContext, which: str) -> None:
    """find and open an old session

    Lists the saved sessions, the newest first; /load more goes on. A name or number of the list opens one. Other words
    are searched for in all of them; if only one has them, it opens.
    Examples: /load 3
              /load sourdough
    """
    if which in ("", "more"):
        _list_page(context, context.searched_text if which else "", start=len(context.listed_sessions) if which else 0)
        return
    path = _find_path(context, which)
    if path is None:
        found = list(islice(context.store.saved_sessions(which), 2))
        if not found:
            raise UserError(f"There is no saved session {which[:80]}; /load lists them.")
        if len(found) > 1:
            _list_page(context, which, start=0)
            return
        path = found[0].path
    open_saved(context, path)


def open_saved(context: CommandContext, path: Path) -> None:
    """Opens a saved session, or goes to it if it is open."""
    for session in context.controller.sessions:
        if context.store.saved_path(session) == path:  # two sessions would overwrite each other in one file
            context.controller.switch(session)
            context.show("this session is open already")
            return
    context.store.wait()
    loaded = context.controller.open_saved(read_session(path))
    context.store.set_path(loaded, path)


@command("delete", "NAME|NUMBER", "saved")
def do_delete(context: CommandContext, which: str) -> None:
    """delete a saved session

    Asks first: the same command again deletes the file. Numbers are those of /load.
    Example: /delete 3
    """
    saved = _find_saved(context, which)
    if any(context.store.saved_path(session) == saved.path for session in context.controller.sessions):
        raise UserError("That session is open; /close it first.")
    if context.to_delete is None or context.to_delete.path != saved.path:
        context.to_delete = saved
        context.show(f"“{saved.title}”, {format_count(saved.num_turns, 'turn')}: the same command again deletes it")
        return
    context.store.delete(saved.path)
    context.to_delete = None
    context.listed_sessions = [each for each in context.listed_sessions if each.path != saved.path]
    context.show(f"deleted: {saved.title}")


def _list_page(context: CommandContext, text: str, start: int) -> None:
    """Lists the sessions that hold a text, from one number on."""
    found = list(islice(context.store.saved_sessions(text), start + PAGE + 1))
    if len(found) <= start:
        context.show("these are all of them" if found else "no session is saved yet")
        return
    context.searched_text, context.listed_sessions = text, found[: start + PAGE]
    more = "; /load more lists more" if len(found) > start + PAGE else ""
    footer = f"/load NUMBER opens one, /load TEXT searches in all of them{more}"
    context.show(*_lines(context.listed_sessions)[start:], footer)


def _lines(sessions: Iterable[SavedSession]) -> list[str]:
    lines = []
    for number, saved in enumerate(sessions, start=1):
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(saved.modified_at))
        name = f"{saved.name}: " if saved.has_own_name else ""
        lines.append(f"{number:>2}  {when}  {format_count(saved.num_turns, 'turn'):>9}  {name}{saved.title}")
    return lines


def _find_saved(context: CommandContext, which: str) -> SavedSession:
    path = _find_path(context, which)
    found = next((saved for saved in context.store.saved_sessions() if saved.path == path), None)
    if found is None:
        raise UserError(f"There is no saved session {which[:80]}; /load lists them.")
    return found


def _find_path(context: CommandContext, which: str) -> Path | None:
    """The file of a session by its number in the last list, or by what the store knows it by."""
    if not context.listed_sessions and which.isdecimal():
        context.listed_sessions = list(islice(context.store.saved_sessions(), PAGE))
    numbered = {str(number): saved.path for number, saved in enumerate(context.listed_sessions, start=1)}
    return numbered.get(which) or context.store.lookup(one_name(which))
