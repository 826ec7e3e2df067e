"""A session as JSON, and back again from a file that anybody may have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cbatch.cli.chat.session.files import read_text
from cbatch.cli.chat.session.session import FINAL_STATES, Reply, Session, Turn, finished_copy, unanswered_turn
from cbatch.cli.common.exits import UserError
from cbatch.cli.run.input.jsonl import parse_json_object
from cbatch.engine import RequestError, SamplingParams

VERSION = 1
MAX_BYTES = 256 * 2**20
KEPT = {"text": str, "seed": int, "params": dict, "error": str, "code": str, "remark": str}
"""Of an answer, beside its state."""
OF_THINKING = {"reasoning": str, "raw": str, "is_thinking": bool}
"""The same, of a model that thinks; not there in other answers."""


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
                "answers": [
                    {name: getattr(reply, name) for name in KEPT}
                    | {name: getattr(reply, name) for name in OF_THINKING if reply.raw}
                    | {"state": reply.state}
                    for reply in map(finished_copy, turn.replies)
                ],
            }
            for turn in [*session.turns, *(unanswered_turn(text) for text in session.queue)]
        ],
    }


def read_session(path: Path) -> Session:
    """Reads what `SessionStore.save` has written. Raises UserError that says what is wrong with the file."""
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


def _from_json(fields: dict[str, Any]) -> Session:
    session = Session(
        _typed(fields["name"], str),
        system=_typed(fields["system"], str | None),
        params=_params(fields["params"]),
        prelude=[_checked_message(message) for message in fields["prelude"]],
        attempts=_typed(fields["attempts"], int) % 2**32,
    )
    for turn in fields["turns"]:
        replies = [_answer(reply) for reply in turn["answers"]]
        chosen = _typed(turn["chosen"], int)
        if not 0 <= chosen < max(len(replies), 1):
            raise IndexError(f"answer {chosen} of {len(replies)}")
        session.items.append(Turn(_typed(turn["user"], str), replies, chosen))
    session.dropped = max(0, min(_typed(fields["dropped"], int), session.num_droppable))
    return session


def _answer(fields: dict[str, Any]) -> Reply:
    if fields["state"] not in FINAL_STATES:
        raise TypeError(f"state {fields['state']!r}")
    kept = {name: _typed(fields[name], kind) for name, kind in KEPT.items()}
    kept |= {name: _typed(fields[name], kind) for name, kind in OF_THINKING.items() if name in fields}
    return Reply(state=fields["state"], **kept | {"params": _params(fields["params"])})


def _params(value: Any) -> dict[str, Any]:
    """Sampling parameters of a session or an answer; the seed is not among them."""
    params: dict[str, Any] = _typed(value, dict)
    SamplingParams().merged(params)
    if "seed" in params:
        raise TypeError("params has a seed")
    return params


def _checked_message(message: Any) -> dict[str, Any]:
    return {"role": _typed(message["role"], str), "content": _typed(message["content"], str)}


def _typed(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind) or (isinstance(value, bool) and kind is int):
        raise TypeError(f"{str(value)[:40]!r} has the wrong type")
    return value
