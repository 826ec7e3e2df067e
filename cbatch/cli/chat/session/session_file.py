"""A session as JSON, and back from a file that anybody may have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cbatch.cli.chat.session.files import read_text
from cbatch.cli.chat.session.reply import FINAL_STATES, Reply
from cbatch.cli.chat.session.session import Session, Turn, unanswered_turn
from cbatch.cli.common.exits import UserError
from cbatch.engine import RequestError, SamplingParams, parse_json_object

VERSION = 1
MAX_BYTES = 256 * 2**20
REPLY_FIELDS = {"text": str, "seed": int, "params": dict, "error": str, "code": str, "remark": str}
"""Fields of `Reply` that are saved beside its state, under the same names."""
THINKING_FIELDS = {"reasoning": str, "raw": str}
"""Saved as well if the model used think tags."""


def to_json(session: Session) -> dict[str, Any]:
    return {
        "cbatch_session": VERSION,
        "name": session.name,
        "system": session.system,
        "params": session.params,
        "prelude": session.prelude,
        "dropped": session.dropped,
        "attempts": session.attempts,
        "turns": [
            {
                "user": turn.text,
                "chosen": turn.chosen,
                "answers": [_reply_fields(reply.finished_copy()) for reply in turn.replies],
            }
            for turn in [*session.turns, *(unanswered_turn(text) for text in session.queue)]
        ],
    }


def read_session(path: Path) -> Session:
    """Reads a file that `SessionStore` wrote. Raises UserError that says what is wrong with the file."""
    try:
        fields = parse_json_object(read_text(path, MAX_BYTES), str(path), "a saved session")
    except RequestError as error:
        raise UserError(f"{error}.") from error
    if fields.get("cbatch_session") != VERSION:
        raise UserError(f"{path} is not a session saved by this version.")
    try:
        return _from_json(fields)
    except RequestError as error:
        raise UserError(f"{path}: {error}") from error
    except (KeyError, TypeError, IndexError, AttributeError) as error:
        raise UserError(f"{path} is damaged: {error!r}.") from error


def _reply_fields(reply: Reply) -> dict[str, Any]:
    names = (*REPLY_FIELDS, *(THINKING_FIELDS if reply.raw else ()), "state")
    return {name: getattr(reply, name) for name in names}


def _from_json(fields: dict[str, Any]) -> Session:
    session = Session(
        _typed(fields["name"], str),
        system=_typed(fields["system"], str | None),
        params=_params(fields["params"]),
        prelude=[_message(message) for message in fields["prelude"]],
        attempts=_typed(fields["attempts"], int) % 2**32,
    )
    for turn in fields["turns"]:
        replies = [_reply(reply) for reply in turn["answers"]]
        chosen = _typed(turn["chosen"], int)
        if not 0 <= chosen < max(len(replies), 1):
            raise IndexError(f"answer {chosen} of {len(replies)}")
        session.items.append(Turn(_typed(turn["user"], str), replies, chosen))
    session.dropped = max(0, min(_typed(fields["dropped"], int), session.num_droppable))
    return session


def _reply(fields: dict[str, Any]) -> Reply:
    if fields["state"] not in FINAL_STATES:
        raise TypeError(f"state {fields['state']!r}")
    values = {name: _typed(fields[name], kind) for name, kind in REPLY_FIELDS.items()}
    values |= {name: _typed(fields[name], kind) for name, kind in THINKING_FIELDS.items() if name in fields}
    return Reply(state=fields["state"], **values | {"params": _params(fields["params"])})


def _params(value: Any) -> dict[str, Any]:
    """Sampling parameters of a session or a reply; the seed is stored apart."""
    params: dict[str, Any] = _typed(value, dict)
    SamplingParams().merged(params)
    if "seed" in params:
        raise TypeError("params has a seed")
    return params


def _message(message: Any) -> dict[str, Any]:
    return {"role": _typed(message["role"], str), "content": _typed(message["content"], str)}


def _typed(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise TypeError(f"{str(value)[:40]!r} has the wrong type")
    return value
