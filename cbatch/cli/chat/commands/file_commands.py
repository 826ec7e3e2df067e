"""Commands for other files: what goes with a message, conversations to read, batches in the background."""

from __future__ import annotations

from functools import partial

from cbatch.cli.chat.commands.registry import CommandContext, command, parse_number
from cbatch.cli.chat.session.attachment import Attachment
from cbatch.cli.chat.session.export import append_row, to_markdown, to_row
from cbatch.cli.chat.session.files import as_path, expand_names, one_name, read_text
from cbatch.cli.chat.session.prompt import takes_messages
from cbatch.cli.common.exits import UserError


@command("read", "[FILE …]", "files")
def do_read(context: CommandContext, names: str) -> None:
    """attach files

    The model gets the files, with their names, before your next message; the screen shows their names and
    tokens above the input line. Blanks in a name are quoted or follow a backslash. /detach takes a file away again.
    Example: /read notes.md src/*.py
    """
    session = context.session
    if not names:
        lines = [f"{number:>2}  {one.label}" for number, one in enumerate(session.attached, start=1)]
        context.show(*(lines or ["nothing is attached; /read FILE attaches a file to your next message"]))
        return
    files = [Attachment(str(path), read_text(path)) for path in expand_names(names)]
    for file in files:
        session.attached = [other for other in session.attached if other.name != file.name] + [file]
        context.controller.client_of(session).count_tokens(file.text, partial(setattr, file, "num_tokens"))


@command("detach", "[N|all]")
def do_detach(context: CommandContext, which: str) -> None:
    """take attached files away

    N is the number in the list of /read; without it the last one goes.
    Example: /detach 2
    """
    attached = context.session.attached
    if not attached:
        raise UserError("Nothing is attached.")
    if which == "all":
        attached.clear()
    else:
        attached.pop(parse_number(which, 1, len(attached)) - 1 if which else -1)


@command("export", "FILE", "file")
def do_export(context: CommandContext, name: str) -> None:
    """write FILE.md or FILE.jsonl

    FILE.md is the conversation to read. To FILE.jsonl it adds a row that `cbatch run` answers as this session would.
    Example: /export talk.md
    """
    path, session = as_path(one_name(name)), context.session
    client = context.controller.client_of(session)
    engine = client.engine
    if session.last is None or engine is None:
        raise UserError("There is no message yet." if session.last is None else "The model is still loading.")
    reply = session.last.reply
    try:
        if path.suffix == ".md":
            with path.open("x", encoding="utf-8", errors="replace") as file:
                file.write(to_markdown(session, engine.loaded.name))
        elif path.suffix == ".jsonl":
            row = to_row(
                session,
                client.params(reply.params if reply else {}),
                engine.limits.max_model_len,
                as_messages=takes_messages(engine),
                template_kwargs={**client.template_kwargs, **session.template_kwargs},
            )
            append_row(path, row)
        else:
            raise UserError(f"{path.name} must end in .md or .jsonl.")
    except OSError as error:
        raise UserError(f"Cannot write {path}: {error.strerror}.") from error
    context.show(f"written to {path}")


@command("run", "FILE -o OUT | stop", "files")
def do_run(context: CommandContext, line: str) -> None:
    """run a batch beside the chat

    Takes the options of `cbatch run` that do not concern the engine. Replies in the chat go first, and the bar shows
    how far the batch is. `stop` ends it; --resume continues it later.
    Example: /run prompts.jsonl -o out.jsonl --max-tokens 200
    """
    session, background = context.session, context.background
    engine = context.controller.client.engine
    if line == "stop":
        if not background.is_running:
            raise UserError("No batch is running.")
        background.stop()
    elif engine is None:
        raise UserError("The model is still loading.")
    else:
        context.batch_session = session  # before the first report
        background.start(engine, line)
