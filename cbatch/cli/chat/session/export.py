"""Sessions as other files: Markdown, and rows for a batch."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cbatch.batch.row import format_row
from cbatch.cli.chat.session.session import Reply, Session, as_plain_text
from cbatch.cli.common.console import safe


def to_markdown(session: Session, model: str) -> str:
    """The conversation as people read it."""
    parts = [f"# {session.name}", f"Model: {model}"]
    if session.system:
        parts.append(f"**system**\n\n{session.system}")
    for turn in session.turns:
        paths = (Path(one.name) for one in turn.attachments if one.digest)
        links = (f"![{safe(path.name)}]({path.as_uri()})" for path in paths)
        parts.append("\n\n".join(filter(None, ["**user**", *links, turn.message])))
        for use in turn.reply.uses if turn.reply is not None else ():
            parts.append(f"**tool**\n\n`{use}`\n\n{use.result}")
        if turn.reply is not None and turn.reply.text:
            parts.append(f"**assistant**\n\n{turn.reply.text}")
    return "\n\n".join(parts) + "\n"


def to_row(
    session: Session,
    params: Mapping[str, Any],
    *,
    as_messages: bool,
    template_kwargs: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """A row for `cbatch run` that gives the last reply of a session again.

    params:      the sampling parameters of that reply that are not the model's defaults, and `max_tokens`
    as_messages: whether the model takes messages; otherwise the row is plain text to continue
    """
    turn = session.last
    assert turn is not None
    reply, messages = turn.reply or Reply(), session.messages(turn)
    asked: dict[str, Any] = {"messages": messages} if as_messages else {"prompt": as_plain_text(messages), "raw": True}
    if as_messages and template_kwargs:
        asked["chat_template_kwargs"] = dict(template_kwargs)
    return {"id": session.name, **asked, **params, "seed": reply.seed}


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Adds a row to a JSONL file, which may be new, or whose last line may not end yet."""
    with path.open("ab+") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(size - 1, 0))
        starts_line = file.read(1) in (b"", b"\n")
        file.write((b"" if starts_line else b"\n") + format_row(row))
