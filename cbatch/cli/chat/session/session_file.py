"""A session as JSON, and back from a file that anybody may have written."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cbatch.base.errors import RequestError
from cbatch.base.params import SamplingParams
from cbatch.base.strict_json import parse_json_object
from cbatch.base.template_options import TemplateOptions
from cbatch.cli.chat.session.attachment import Attachment, pastes_in
from cbatch.cli.chat.session.files import read_text
from cbatch.cli.chat.session.reply import FINAL_STATES, Reply
from cbatch.cli.chat.session.session import Session, Turn, unanswered
from cbatch.cli.chat.session.tool_round import ToolRound, ToolUse
from cbatch.cli.common.exits import UserError

VERSION = 1
MAX_BYTES = 256 * 2**20
REPLY_FIELDS = {"text": str, "seed": int, "params": dict, "error": str, "code": str, "remark": str}
"""Fields of `Reply` that are saved beside its state, under the same names."""
THINKING_FIELDS = {"reasoning": str, "raw": str}
"""Saved as well if the model used think tags."""
COUNT_FIELDS = {"prompt_tokens": int, "num_tokens": int}
"""Saved if they are known."""
OPTIONAL_FIELDS = THINKING_FIELDS | COUNT_FIELDS | {"label": str, "model": str}


def to_json(session: Session) -> dict[str, Any]:
    return {
        "cbatch_session": VERSION,
        "name": session.name,
        "system": session.system,
        "params": session.params,
        "model": session.model,
        "seed": session.seed,
        "template_kwargs": session.template_kwargs,
        "draft": session.draft,
        "pastes": [_attachment_fields(one) for one in pastes_in(session.draft, session.pastes)],
        "attached": [_attachment_fields(one) for one in session.attached],
        "prelude": session.prelude,
        "dropped": session.dropped,
        "attempts": session.attempts,
        "turns": [
            {
                "user": turn.text,
                "attached": [_attachment_fields(one) for one in turn.attachments],
                "chosen": turn.chosen,
                "answers": [_reply_fields(reply.finished_copy()) for reply in turn.replies],
            }
            for turn in [*session.turns, *(unanswered(turn) for turn in session.queue)]
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


def _attachment_fields(one: Attachment) -> dict[str, Any]:
    return {"name": one.name, "text": one.text, "is_paste": one.is_paste}


def _reply_fields(reply: Reply) -> dict[str, Any]:
    optional = (*(THINKING_FIELDS if reply.raw else ()), *(COUNT_FIELDS if reply.prompt_tokens else ()))
    names = (*REPLY_FIELDS, *optional, *(name for name in ("label", "model") if getattr(reply, name)), "state")
    fields = {name: getattr(reply, name) for name in names}
    return fields | ({"rounds": [_round_fields(each) for each in reply.rounds]} if reply.rounds else {})


def _round_fields(each: ToolRound) -> dict[str, Any]:
    uses = [{"name": use.name, "arguments": use.arguments, "result": use.result} for use in each.uses]
    return {"text": each.text, "calls": uses}


def _from_json(fields: dict[str, Any]) -> Session:
    session = Session(
        _typed(fields["name"], str),
        system=_typed(fields["system"], str | None),
        params=_params(fields["params"]),
        prelude=[_message(message) for message in fields["prelude"]],
        attempts=_typed(fields["attempts"], int) % 2**32,
        seed=_typed(fields.get("seed"), int | None),
        model=_typed(fields.get("model", ""), str),
        template_kwargs=dict(TemplateOptions(kwargs=_typed(fields.get("template_kwargs", {}), dict)).kwargs),
        draft=_typed(fields.get("draft", ""), str),
        attached=[_attachment(one) for one in fields.get("attached", [])],
        pastes=[_attachment(one) for one in fields.get("pastes", [])],
    )
    for turn in fields["turns"]:
        replies = [_reply(reply) for reply in turn["answers"]]
        chosen = _typed(turn["chosen"], int)
        if not 0 <= chosen < max(len(replies), 1):
            raise IndexError(f"answer {chosen} of {len(replies)}")
        made = Turn(_typed(turn["user"], str), replies, chosen)
        made.attachments = [_attachment(one) for one in turn.get("attached", [])]
        session.items.append(made)
    session.dropped = max(0, min(_typed(fields["dropped"], int), session.num_droppable))
    return session


def _attachment(fields: dict[str, Any]) -> Attachment:
    name, text = _typed(fields["name"], str), _typed(fields["text"], str)
    return Attachment(name, text, _typed(fields["is_paste"], bool))


def _reply(fields: dict[str, Any]) -> Reply:
    if fields["state"] not in FINAL_STATES:
        raise TypeError(f"state {fields['state']!r}")
    values = {name: _typed(fields[name], kind) for name, kind in REPLY_FIELDS.items()}
    values |= {name: _typed(fields[name], kind) for name, kind in OPTIONAL_FIELDS.items() if name in fields}
    values["rounds"] = [_round(each) for each in fields.get("rounds", [])]
    return Reply(state=fields["state"], **values | {"params": _params(fields["params"])})


def _round(fields: dict[str, Any]) -> ToolRound:
    made = ToolRound(_typed(fields["text"], str))
    for call in fields["calls"]:
        name, arguments, result = (_typed(call[name], str) for name in ("name", "arguments", "result"))
        made.uses.append(ToolUse(name, arguments, "done", result))
    return made


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
