"""Sessions as files for others, and the other way round: Markdown, rows of a batch, results of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cbatch.cli.chat.session import Answer, Session
from cbatch.cli.jsonl import format_row, parse_line, parse_object
from cbatch.cli.lines import Line, read_lines
from cbatch.cli.row import Row
from cbatch.engine import ConfigError, RequestError, SamplingParams


def to_markdown(session: Session, model: str) -> str:
    """The conversation for people to read."""
    parts = [f"# {session.name}", f"Model: {model}"]
    if session.system:
        parts.append(f"**system**\n\n{session.system}")
    parts += [f"**{message['role']}**\n\n{message['content']}" for message in session.prelude]
    for turn in session.turns:
        parts.append(f"**user**\n\n{turn.text}")
        if turn.answer is not None and turn.answer.text:
            parts.append(f"**assistant**\n\n{turn.answer.text}")
    return "\n\n".join(parts) + "\n"


def to_row(session: Session, params: SamplingParams, context: int) -> dict[str, Any]:
    """A row for `cbatch run` that asks the last question of a session, as it was asked here.

    params:  the effective sampling parameters of the last answer
    context: the model's, which is the limit of an answer that has no other
    """
    turn = session.last
    assert turn is not None
    answer = turn.answer or Answer()
    fields: dict[str, Any] = {"id": session.name, "messages": session.messages(turn)}
    return fields | answer.params | {"max_tokens": params.max_tokens or context, "seed": answer.seed}


def write_markdown(path: Path, text: str) -> None:
    """Raises ConfigError where a file is there already, or cannot be written."""
    try:
        with path.open("x", encoding="utf-8", errors="replace") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(f"Cannot write {path}: {error.strerror}.") from error


def append_row(path: Path, row: dict[str, Any]) -> None:
    """Adds a row to a JSONL file, which may be new. Raises ConfigError where that cannot be done."""
    try:
        with path.open("ab+") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(size - 1, 0))
            starts_line = file.read(1) in (b"", b"\n")
            file.write((b"" if starts_line else b"\n") + format_row(row))
    except OSError as error:
        raise ConfigError(f"Cannot write {path}: {error.strerror}.") from error


def from_result(path: Path, index: int, prompts: Path | None) -> Session:
    """A session from a row of a batch's output, and the row of its input where that file is given.

    Raises ConfigError where there is no such row, or it is an error.
    """
    result = _find_result(path, index)
    text = _text_of(result, f"row {index} of {path}")
    session = Session(f"row-{index}")
    if prompts is not None:
        row = _find_row(prompts, index)
        messages = row.messages or [{"role": "user", "content": row.prompt or ""}]
        session.take_messages(messages)
        session.params = {name: value for name, value in row.params.items() if name != "seed"}
    last = session.last
    if last is not None and not last.answers:
        last.answers.append(Answer(text, state=_state_of(result)))
    else:
        session.prelude.append({"role": "assistant", "content": text})
    return session


def _find_result(path: Path, index: int) -> dict[str, Any]:
    found: dict[str, Any] | None = None
    for line in _lines(path):
        try:
            fields = parse_object((line.data or b"").decode(), f"{path}, line {line.index + 1}", "a row")
        except (RequestError, UnicodeDecodeError):
            continue  # of a journal the last line may be torn
        if fields.get("index") == index:
            found = fields  # in a journal the last row of an index counts
    if found is None:
        raise ConfigError(f"There is no row with index {index} in {path}.")
    return found


def _find_row(path: Path, index: int) -> Row:
    for line in _lines(path):
        if line.index == index:
            row = parse_line(line, allow_unknown=True)
            if row.error is not None:
                raise ConfigError(f"{path}: {row.error}.")
            if row.messages is None and row.prompt is None:
                raise ConfigError(f"{path}: line {index + 1} asks with token ids, which are no conversation.")
            return row
    raise ConfigError(f"{path} has no line {index + 1}, which index {index} means.")


def _lines(path: Path) -> Iterator[Line]:
    try:
        with path.open("rb") as file:
            yield from read_lines(file)
    except OSError as error:
        raise ConfigError(f"Cannot read {path}: {error.strerror}.") from error


def _text_of(result: dict[str, Any], where: str) -> str:
    """The answer in a row of output, of either form."""
    error = result.get("error")
    text = result.get("text")
    if isinstance(response := result.get("response"), dict):
        try:
            choice = response["body"]["choices"][0]
            text = choice["message"]["content"] if "message" in choice else choice["text"]
        except (KeyError, IndexError, TypeError):
            text = None
    if isinstance(error, dict):
        raise ConfigError(f"{where} is an error: {error.get('message')}")
    if not isinstance(text, str):
        raise ConfigError(f"{where} holds no text.")
    return text


def _state_of(result: dict[str, Any]) -> Any:
    return "length" if result.get("finish_reason") == "length" else "stop"
