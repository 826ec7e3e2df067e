"""Commands for files: saving, loading and exporting sessions, and running a batch in the background."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from cbatch.cli.chat.commands.registry import CommandContext, command, format_turn_count
from cbatch.cli.chat.session.export import append_row, to_markdown, to_row
from cbatch.cli.chat.session.files import as_path, read_text
from cbatch.cli.chat.session.prompt import takes_messages
from cbatch.cli.chat.session.session_file import read_session
from cbatch.cli.chat.session.store import SavedSession, is_path
from cbatch.cli.common.exits import UserError


@command("save", "[NAME]", "saved")
def do_save(context: CommandContext, name: str) -> None:
    """save this session under a name"""
    path = context.store.save_as(context.session, name or context.session.name)
    if path.parent == context.store.sessions_folder and path.stem != context.session.name:
        with suppress(UserError):  # it is more than one word, or another session's name
            context.controller.rename(context.session, path.stem)
            context.store.save_as(context.session, str(path))
    is_kept = context.controller.store is not None
    later = "and kept up to date there" if is_kept else "as it is now; with --no-history it is not kept up to date"
    context.show(f"saved as {path}, {later}")


@command("load", "[NAME|NUMBER|FILE]", "saved")
def do_load(context: CommandContext, which: str) -> None:
    """open a saved session, or list them"""
    if not which:
        context.listed_sessions = context.store.list_saved()[:20]
        lines = [_saved_line(number, saved) for number, saved in enumerate(context.listed_sessions, start=1)]
        context.show(*(lines or ["no session is saved yet"]))
        return
    path = _find_saved(context, which)
    for session in context.controller.sessions:
        if context.store.saved_path(session) == path:  # two sessions would overwrite each other in one file
            context.controller.switch(session)
            context.show("this session is open already")
            return
    context.store.wait()
    loaded = context.controller.add_loaded(read_session(path))
    context.store.set_path(loaded, path)


@command("export", "FILE", "file")
def do_export(context: CommandContext, name: str) -> None:
    """write FILE.md to read, FILE.jsonl for cbatch run"""
    path, session = as_path(name), context.session
    engine = context.controller.client.engine
    if session.last is None or engine is None:
        raise UserError("There is no message yet." if session.last is None else "The model is still loading.")
    reply = session.last.reply
    try:
        if path.suffix == ".md":
            with path.open("x", encoding="utf-8", errors="replace") as file:
                file.write(to_markdown(session, engine.loaded.name))
        elif path.suffix == ".jsonl":
            params = context.controller.client.params(reply.params if reply else {})
            row = to_row(
                session,
                params,
                engine.limits.max_model_len,
                as_messages=takes_messages(engine),
                template_kwargs=context.controller.client.template_kwargs,
            )
            append_row(path, row)
        else:
            raise UserError(f"{name} must end in .md or .jsonl.")
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror}.") from error
    context.show(f"written to {path}")


@command("run", "FILE -o OUT | stop", "file")
def do_run(context: CommandContext, line: str) -> None:
    """run a batch in the background, like cbatch run"""
    engine = context.controller.client.engine
    if line == "stop":
        if not context.background.is_running:
            raise UserError("No batch is running.")
        context.background.stop()
    elif engine is None:
        raise UserError("The model is still loading.")
    else:
        output = context.background.start(engine, line)
        context.show(f"the batch writes to {output}; replies in the chat go first")


@command("read", "FILE", "file")
def do_read(context: CommandContext, name: str) -> None:
    """put a file's text before the next message"""
    text = read_text(as_path(name))
    context.session.attached.append(text)
    context.show(f"{name} ({len(text):,} characters) goes before your next message")


def _find_saved(context: CommandContext, which: str) -> Path:
    """Finds a session by its number in the last list, by its file, or by its name: the newest one of that name."""
    numbered = {str(number): saved.path for number, saved in enumerate(context.listed_sessions, start=1)}
    if which in numbered:
        return numbered[which]
    try:
        with suppress(UserError):  # what cannot be a file may still be a session's name
            if (path := context.store.path_of(which)).exists():
                return path
    except OSError as error:
        raise UserError(f"Cannot read {which[:80]}: {error.strerror}.") from error
    for saved in context.store.list_saved():
        if saved.name == which:
            return saved.path
    if is_path(which):
        return context.store.path_of(which)  # reading it says what is wrong
    raise UserError(f"There is no saved session {which[:80]}; /load lists them.")


def _saved_line(number: int, saved: SavedSession) -> str:
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(saved.modified_at))
    return f"{number:>2}  {when}  {saved.name:<12} {format_turn_count(saved.num_turns)}  {saved.preview}"
