"""Commands for sessions on disk and other files, and the help."""

from __future__ import annotations

import re
import time
from contextlib import suppress
from itertools import islice, zip_longest
from pathlib import Path

from cbatch.base.errors import os_errors_as
from cbatch.base.units import format_count
from cbatch.cli.chat.commands.registry import ALIASES, COMMANDS, FrontEnd, command, did_you_mean, parse_number
from cbatch.cli.chat.engine_client import fitted, room_beside, takes_messages
from cbatch.cli.chat.pictures import read_attachment
from cbatch.cli.chat.session.export import append_row, to_markdown, to_row
from cbatch.cli.chat.session.files import as_path, expand_names, one_name
from cbatch.cli.chat.session.store import has_own_name, modified_at
from cbatch.cli.common.exits import UserError

PAGE = 15
"""Sessions that `/load` lists at once; they fit a screen of 24 lines."""

_GIVEN_NAME = re.compile(r"(main|s\d+|loaded)(-\d+)?")
"""Names that sessions get by themselves; they tell nothing."""


@command("save", "[NAME]", "saved")
def do_save(chat: FrontEnd, name: str) -> None:
    """save under a name

    Sessions are saved anyway; a name makes one easy to find again. A name with a slash, or one that ends in .json, is
    a path.
    Example: /save recipes
    """
    name = one_name(name)
    session, store = chat.session, chat.store
    if not name and has_own_name(session.path):
        name = str(session.path)
    path = store.save_as(session, name or session.name)
    if path.parent == store.sessions_folder and path.stem != session.name:
        with suppress(UserError):  # it is more than one word, or another session's name
            chat.controller.rename(session, path.stem)
            store.save_as(session, str(path))
    is_kept = chat.controller.store is not None
    later = "and kept up to date there" if is_kept else "as it is now; with --no-history it is not kept up to date"
    chat.show(f"saved as {path}, {later}")


@command("load", "[NAME|NUMBER|FILE|TEXT]", "stored")
def do_load(chat: FrontEnd, which: str) -> None:
    """find and open an old session

    Lists the saved sessions, the newest first; /load more goes on. A name or number of the list opens one. Other words
    are searched for in all of them; if only one has them, it opens.
    Examples: /load 3
              /load sourdough
    """
    if which in ("", "more"):
        _list_page(chat, chat.searched_text if which else "", start=len(chat.listed_sessions) if which else 0)
        return
    path = _find_path(chat, which)
    if path is None:
        found = list(islice(chat.store.saved_sessions(which), 2))
        if not found:
            raise UserError(f"There is no saved session {which[:80]}; /load lists them.")
        if len(found) > 1:
            _list_page(chat, which, start=0)
            return
        path = found[0].path
    assert path is not None
    for session in chat.controller.sessions:
        if session.path == path:  # two sessions would overwrite each other in one file
            chat.controller.switch(session)
            chat.show("this session is open already")
            return
    chat.controller.open_saved(chat.store.open(path))


@command("delete", "NAME|NUMBER", "stored")
def do_delete(chat: FrontEnd, which: str) -> None:
    """delete a saved session

    Asks first: the same command again deletes the file. Numbers are those of /load.
    Example: /delete 3
    """
    path = _find_path(chat, which)
    saved = next((each for each in chat.store.saved_sessions() if each.path == path), None)
    if path is None or saved is None:
        raise UserError(f"There is no saved session {which[:80]}; /load lists them.")
    if any(session.path == path for session in chat.controller.sessions):
        raise UserError("That session is open; /close it first.")
    if not chat.confirms("delete", path):
        chat.show(f"“{saved.title}”, {format_count(len(saved.turns), 'turn')}: the same command again deletes it")
        return
    chat.store.delete(path)
    chat.listed_sessions = [each for each in chat.listed_sessions if each.path != path]
    chat.show(f"deleted: {saved.title}")


def _list_page(chat: FrontEnd, text: str, start: int) -> None:
    """Lists the sessions that hold a text, from one number on."""
    found = list(islice(chat.store.saved_sessions(text), start + PAGE + 1))
    if len(found) <= start:
        chat.show("these are all of them" if found else "no session is saved yet")
        return
    chat.searched_text, chat.listed_sessions = text, found[: start + PAGE]
    more = "; /load more lists more" if len(found) > start + PAGE else ""
    lines = []
    for number, saved in enumerate(chat.listed_sessions[start:], start=start + 1):
        assert saved.path is not None
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(modified_at(saved.path)))
        name = "" if _GIVEN_NAME.fullmatch(saved.name) else f"{saved.name}: "
        lines.append(f"{number:>2}  {when}  {format_count(len(saved.turns), 'turn'):>9}  {name}{saved.title}")
    chat.show(*lines, f"/load NUMBER opens one, /load TEXT searches in all of them{more}")


def _find_path(chat: FrontEnd, which: str) -> Path | None:
    """The file of a session by its number in the last list, or by what the store knows it by."""
    if not chat.listed_sessions and which.isdecimal():
        chat.listed_sessions = list(islice(chat.store.saved_sessions(), PAGE))
    numbered = {str(number): saved.path for number, saved in enumerate(chat.listed_sessions, start=1)}
    return numbered.get(which) or chat.store.lookup(one_name(which))


@command("read", "[FILE …]", "files")
def do_read(chat: FrontEnd, names: str) -> None:
    """attach files (also /attach)

    The model gets the files, with their names, before your next message; the screen shows their names and
    tokens above the input line. Models that take images get pictures, too; a picture that is dropped on the terminal is
    attached. Blanks in a name are quoted or follow a backslash. /detach takes a file away again, and /fit shortens a
    text that is too long.
    Example: /read notes.md src/*.py cat.png
    """
    session = chat.session
    if not names:
        lines = [f"{number:>2}  {one.label}" for number, one in enumerate(session.attached, start=1)]
        chat.show(*(lines or ["nothing is attached; /read FILE attaches a file to your next message"]))
        return
    for file in [read_attachment(path) for path in expand_names(names)]:
        chat.attach(session, file)


@command("detach", "[N|all]")
def do_detach(chat: FrontEnd, which: str) -> None:
    """take attached files away

    N is the number in the list of /read; without it the last one goes.
    Example: /detach 2
    """
    attached = chat.session.attached
    if not attached:
        raise UserError("Nothing is attached.")
    if which == "all":
        attached.clear()
    else:
        attached.pop(parse_number(which, 1, len(attached)) - 1 if which else -1)


@command("fit")
def do_fit(chat: FrontEnd, _: str) -> None:
    """cut what is attached to fit

    Leaves out the middle of the longest attached text, so that the context has room for the message and a reply.
    """
    session, client = chat.session, chat.controller.client_of(chat.session)
    texts = [one for one in session.attached if not one.digest]
    if not texts:
        raise UserError("No text is attached.")
    longest = max(texts, key=lambda one: len(one.text))
    others = sum(one.num_tokens or 0 for one in session.attached if one is not longest)
    messages, params = session.messages_with(""), client.params(session.params)

    def on_fitted(found: tuple[str, int]) -> None:
        text, left_out = found
        if text:
            longest.text = text
            chat.attach(session, longest)
        why = f"{left_out:,} characters in its middle are left out" if text else "there is no room; /trim makes some"
        session.add_notice(f"{longest.name}: {why}", is_passing=True)

    client.compute(
        lambda engine: fitted(engine, longest.text, room_beside(engine, messages, params) - others), on_fitted
    )


@command("export", "FILE", "file")
def do_export(chat: FrontEnd, name: str) -> None:
    """write FILE.md or FILE.jsonl

    FILE.md is the conversation to read; if there is such a file, the same command again replaces it. To FILE.jsonl it
    adds a row that `cbatch run` answers as this session would.
    Example: /export talk.md
    """
    path, session = as_path(one_name(name)), chat.session
    if session.last is None:
        raise UserError("There is no message yet.")
    client, engine, reply = chat.controller.client_of(session), chat.engine, session.last.reply
    with os_errors_as(UserError, f"Cannot write {path}"):
        if path.suffix == ".md":
            if path.exists() and not chat.confirms("export", path):
                chat.show(f"{path} exists: the same command again replaces it")
                return
            path.write_text(to_markdown(session, engine.loaded.name), encoding="utf-8", errors="replace")
        elif path.suffix == ".jsonl":
            params = reply.params if reply else {}
            limit = client.params(params).max_tokens or engine.limits.max_model_len
            row = to_row(
                session,
                {**client.chat_params, **params, "max_tokens": limit},
                as_messages=takes_messages(engine),
                template_kwargs={**client.template_kwargs, **session.template_kwargs},
            )
            append_row(path, row)
        else:
            raise UserError(f"{path.name} must end in .md or .jsonl.")
    chat.show(f"written to {path}")


@command("run", "FILE -o OUT | stop", "files")
def do_run(chat: FrontEnd, line: str) -> None:
    """run a batch beside the chat

    Takes the options of `cbatch run` that do not concern the engine. Replies in the chat go first, and the bar shows
    how far the batch is. `stop` ends it; --resume continues it later.
    Example: /run prompts.jsonl -o out.jsonl --max-tokens 200
    """
    if line != "stop":
        engine = chat.controller.client.require_engine()
        chat.batch_session = chat.session  # before the first report
        chat.background.start(engine, line)
    elif chat.background.is_running:
        chat.background.stop()
    else:
        raise UserError("No batch is running.")


NAME_WIDTH, COLUMN_WIDTH = 10, 39
"""Two columns of commands fit a screen of 80 cells."""

KEYS = (
    ("Enter", "sends; in a menu it takes the entry"),
    ("Ctrl-J, \\ Enter, Alt-Enter", "begin a new line"),
    ("Esc", "stops the reply; closes a menu or a comparison"),
    ("Ctrl-C", "clears the line, which Up brings back; else stops the reply"),
    ("Ctrl-D", "leaves, on an empty line"),
    ("Tab", "completes commands, names, and files after @"),
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
def do_help(chat: FrontEnd, name: str) -> None:
    """list the commands

    /help NAME explains a command, /help keys lists the keys.
    Example: /help retry
    """
    name, is_wide = name.lstrip("/"), chat.columns >= 2 * COLUMN_WIDTH
    if name == "keys":
        chat.show(*(f"{keys:<27} {action}" if is_wide else f"{keys}: {action}" for keys, action in KEYS))
    elif not name:
        entries = [f"/{item.name}".ljust(NAME_WIDTH) + item.description for item in COMMANDS.values()]
        height = (len(entries) + 1) // 2 if is_wide else len(entries)  # two columns, read downwards, fit on 24 lines
        columns = zip_longest(entries[:height], entries[height:], fillvalue="")
        rows = [(left.ljust(COLUMN_WIDTH) + right).rstrip() for left, right in columns]
        chat.show(*rows, "/help NAME explains a command and gives an example; /help keys lists the keys.")
    elif found := COMMANDS.get(ALIASES.get(name, name)):
        chat.show(f"/{found.name} {found.usage}".rstrip(), f"{found.description}.", found.details)
    else:
        hint = did_you_mean(name, [*COMMANDS, "keys"], "/help ") or "/help lists all of them."
        raise UserError(f"There is no command /{name[:40]}; {hint}")
