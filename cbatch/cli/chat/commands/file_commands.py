"""Commands about files: keeping sessions, handing them on, and running a batch underneath."""

from __future__ import annotations

import time
from contextlib import suppress
from pathlib import Path

from cbatch.cli.chat.commands.registry import Desk, command, counted, need
from cbatch.cli.chat.session.export import append_row, to_markdown, to_row, write_markdown
from cbatch.cli.chat.session.paths import as_path, read_text
from cbatch.cli.chat.session.prompt import takes_messages
from cbatch.cli.chat.session.session_file import read_session
from cbatch.cli.chat.session.store import Saved
from cbatch.engine import ConfigError


@command("save", "[NAME]", "saved")
def do_save(desk: Desk, name: str) -> None:
    """keeps this session under a name"""
    path = desk.store.save_as(desk.session, name or desk.session.name)
    if path.parent == desk.store.sessions_folder.resolve() and path.stem != desk.session.name:
        with suppress(ConfigError):  # a name of more than one word, or that of another session
            desk.room.rename(desk.session, path.stem)
            desk.store.save_as(desk.session, str(path))
    later = "and kept there from now on" if desk.room.store is not None else "as it is now; --no-history keeps no more"
    desk.say(f"saved as {path}, {later}")


@command("load", "[NAME|NUMBER|FILE]", "saved")
def do_load(desk: Desk, which: str) -> None:
    """opens a saved session, or lists them"""
    if not which:
        desk.listed = desk.store.saved()[:20]
        desk.say(*map(_saved_line, range(1, 21), desk.listed) if desk.listed else ["nothing is saved yet"])
        return
    path = _find_saved(desk, which)
    for session in desk.room.sessions:
        if desk.store.path_kept(session) == path:  # two of them in one file would overwrite each other
            desk.room.switch(session)
            desk.say("it is open here")
            return
    desk.store.wait()
    loaded = desk.room.add(read_session(path))
    desk.store.keeps_at(loaded, path)


@command("export", "FILE", "file")
def do_export(desk: Desk, name: str) -> None:
    """FILE.md to read, FILE.jsonl for cbatch run"""
    need(name, "/export FILE.md or /export FILE.jsonl")
    path, session = as_path(name), desk.session
    driver = desk.room.client.driver
    if session.last is None or driver is None:
        raise ConfigError("There is no message yet." if session.last is None else "The model is still being loaded.")
    if path.suffix == ".md":
        write_markdown(path, to_markdown(session, driver.engine.loaded.name))
    elif path.suffix == ".jsonl":
        answer = session.last.answer
        params = desk.room.client.params(answer.params if answer else {})
        engine = driver.engine
        row = to_row(session, params, engine.model.max_model_len, as_messages=takes_messages(engine))
        append_row(path, row)
    else:
        raise ConfigError(f"{name} ends neither in .md nor in .jsonl.")
    desk.say(f"written to {path}")


@command("run", "FILE -o OUT | stop", "file")
def do_run(desk: Desk, line: str) -> None:
    """a batch underneath, as cbatch run does it"""
    driver = desk.room.client.driver
    if line == "stop":
        if not desk.background.is_running:
            raise ConfigError("No batch is running.")
        desk.background.stop()
    elif driver is None:
        raise ConfigError("The model is still being loaded.")
    else:
        desk.say(f"it writes into {desk.background.start(driver, line)}; answers here go before it")


@command("read", "FILE", "file")
def do_read(desk: Desk, name: str) -> None:
    """puts a file's text before the next message"""
    need(name, "/read FILE")
    text = read_text(as_path(name))
    desk.session.attached.append(text)
    desk.say(f"{name}, {len(text):,} characters, goes before your next message")


def _find_saved(desk: Desk, which: str) -> Path:
    """By the number in the last list, the name of a file, or that of the newest session that is called so."""
    numbered = {str(number): saved.path for number, saved in enumerate(desk.listed, start=1)}
    if which in numbered:
        return numbered[which]
    refusal = None
    try:
        path = desk.store.path_of(which)
        if path.exists():
            return path
    except ConfigError as error:
        refusal = error
    except OSError as error:
        raise ConfigError(f"Cannot read {which[:80]}: {error.strerror}.") from error
    for saved in desk.store.saved():
        if saved.name == which:
            return saved.path
    if refusal is not None:
        raise refusal
    return path


def _saved_line(number: int, saved: Saved) -> str:
    when = time.strftime("%Y-%m-%d %H:%M", time.localtime(saved.when))
    return f"{number:>2}  {when}  {saved.name:<12} {counted(saved.turns)}  {saved.beginning}"
