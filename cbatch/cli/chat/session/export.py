"""Sessions to and from other files: Markdown, rows for a batch, results of a batch."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from cbatch.base.errors import RequestError, os_errors_as
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request
from cbatch.base.strict_json import parse_json_object
from cbatch.batch.lines import Line, RowOptions, read_lines
from cbatch.batch.row import format_row
from cbatch.cli.chat.session.session import Reply, Session, as_plain_text
from cbatch.cli.common.exits import UserError


def to_markdown(session: Session, model: str) -> str:
    """The conversation as people read it."""
    parts = [f"# {session.name}", f"Model: {model}"]
    if session.system:
        parts.append(f"**system**\n\n{session.system}")
    parts += [f"**{message['role']}**\n\n{message['content']}" for message in session.prelude]
    for turn in session.turns:
        parts.append(f"**user**\n\n{turn.message}")
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


def from_result(path: Path, index: int, prompts: Path | None, run_seed: int = 0) -> tuple[Session, int | None]:
    """A session from a row of a batch's output, and the length of the row's prompt, if it can be compared.

    prompts:  the batch's input, which holds the question; None leaves it out
    run_seed: the batch's seed, which gives a row without one its seed

    Raises UserError if there is no such row, it is an error row, or the question belongs to another row.
    """
    from cbatch.requests.completion import Completion

    result, where = _find_result(path, index), f"row {index} of {path}"
    try:
        done = Completion.from_row(result)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise UserError(f"{where} is not a row of cbatch run: {error!r}.") from error
    if done.error is not None:
        raise UserError(f"{where} is an error: {done.error}")
    if not isinstance(done.text, str):
        raise UserError(f"{where} has no text.")
    reply = Reply(done.text, state="length" if done.finish_reason == "length" else "stop")
    session, prompt_tokens = Session(f"row-{index}"), None
    if prompts is not None:
        row = _find_row(prompts, index)
        _check_same_row(result, row, f"R{where[1:]}", f"line {index + 1} of {prompts}")
        prompt_tokens = None if row.raw else done.usage.prompt_tokens
        session.load_messages([dict(one) for one in row.messages or [{"role": "user", "content": row.text or ""}]])
        reply.params = {name: value for name, value in row.given.items() if name != "seed"}
        reply.seed = row.given.get("seed", row.derived_seed(run_seed))
        # The length limit of this one reply does not apply to the rest of the conversation.
        session.params = {name: value for name, value in reply.params.items() if name != "max_tokens"}
    last = session.last
    if last is not None and not last.replies:
        last.replies.append(reply)
    else:
        session.prelude.append({"role": "assistant", "content": reply.text})
    return session, prompt_tokens


def _check_same_row(result: Mapping[str, Any], row: Request, output: str, source: str) -> None:
    """Raises UserError if a row of output was made from another row of input: ids and carried columns tell."""
    made_from = result.get("custom_id", result.get("id"))
    if made_from != row.id and not (row.id is None and "custom_id" in result):
        raise UserError(f"{output} has the id {made_from!r}, but {source} has {row.id!r}: is it the right file?")
    extra = result.get("extra", {})
    if isinstance(extra, dict) and extra != row.extra:
        strange = next(name for name in [*extra, *row.extra] if extra.get(name) != row.extra.get(name))
        raise UserError(f"{output} has another {strange!r} than {source}: is it the right file?")


def _find_result(path: Path, index: int) -> dict[str, Any]:
    found: dict[str, Any] | None = None
    for line in _lines(path):
        with suppress(RequestError):  # the last line of a journal may be torn
            fields = parse_json_object(line.text(str(path)), str(path), "a row")
            if type(fields.get("index")) is int and fields["index"] == index:
                found = fields  # the last row of an index counts
    if found is None:
        raise UserError(f"There is no row with index {index} in {path}.")
    return found


def _find_row(path: Path, index: int) -> Request:
    from cbatch.batch.lines import parse_line

    for line in _lines(path):
        if line.index == index:
            row = parse_line(line, RowOptions(allow_unknown=True))
            try:
                SamplingParams().merged(row.given)
            except RequestError as error:
                row.error = row.invalid(str(error))
            if row.error is not None:
                raise UserError(f"{path}: {row.error}.")
            if row.messages is None and row.text is None:
                raise UserError(f"{path}: line {index + 1} holds token ids, which are not a conversation.")
            return row
    raise UserError(f"{path} has no line {index + 1} (index {index}).")


def _lines(path: Path) -> Iterator[Line]:
    with os_errors_as(UserError, f"Cannot read {path}"), path.open("rb") as file:
        yield from read_lines(file)
