"""Columns of a row of output that it has only if they are asked for. Each is said here, once.

A new one needs an entry in COLUMNS and a field of `RunOptions` with its name, which makes the option. In a table of
results, such columns stand behind those that every row has.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from cbatch.base.request import Request
from cbatch.base.units import rounded_s

if TYPE_CHECKING:
    from cbatch.requests.completion import Choice, Completion
    from cbatch.text.tokenizer import ChatTokenizer

Fields = Mapping[str, Any]

OF_THE_MOMENT = ("cached_tokens", "ttft_s", "elapsed_s", "from_cache", "images_s")
"""Fields that no two runs have alike: those of `timings`, of which the last two are only there if there is reason."""


DROPPED = "dropped_prompt_tokens"
"""A field of rows whose prompt was cut, whether it is asked for or not."""


def _token_ids(choice: Choice) -> Fields:
    return {"token_ids": list(choice.token_ids)}


def _prompt_text(request: Request, tokenizer: ChatTokenizer | None) -> Fields:
    """The text that was tokenized: plain text, or a conversation through the chat template. Of ids, what they say."""
    if request.text is not None and not request.dropped_tokens:
        return {"prompt_text": request.text}
    text = tokenizer.decode(request.prompt_ids, skip_special_tokens=False) if tokenizer is not None else None
    return {"prompt_text": text}


def _timings(completion: Completion) -> Fields:
    timing = completion.timing
    first, taken = timing.first_token_at, timing.taken_at
    ttft_s = rounded_s(first - taken) if first is not None else None
    elapsed_s, images_s = rounded_s(timing.finished_at - taken), rounded_s(completion.images_s) or False
    values = (completion.usage.cached_tokens, ttft_s, elapsed_s, completion.from_cache, images_s)
    return {name: value for name, value in zip(OF_THE_MOMENT, values, strict=True) if value is not False}


@dataclass(frozen=True, slots=True)
class Column:
    """A column, or several that go together. One of the first three says what it holds, as fields of the row.

    of_output:  of each output; stands beside its text
    of_request: of the request as it was encoded, and the model's tokenizer, if it has one; stands before `usage`
    of_row:     of the whole result; stands behind everything else. Error rows have it, too
    is_in_key:  whether it counts in the key of a row, so that a run that resumes does not mix rows with and without it;
                not for what depends on the moment
    """

    of_output: Callable[[Choice], Fields] | None = None
    of_request: Callable[[Request, ChatTokenizer | None], Fields] | None = None
    of_row: Callable[[Completion], Fields] | None = None
    is_in_key: bool = True


COLUMNS: Mapping[str, Column] = {
    "token_ids": Column(of_output=_token_ids),
    "echo_prompt": Column(of_request=_prompt_text),
    "timings": Column(of_row=_timings, is_in_key=False),
}
"""By the option of `cbatch run` that asks for them."""

KEYED = [name for name, column in COLUMNS.items() if column.is_in_key]
OPTIONS = ", ".join(f"--{name.replace('_', '-')}" for name in KEYED)
"""Those that count in keys, and what people call them."""


def in_key(asked: Iterable[str]) -> list[str]:
    """The columns among these that count in a row's key. `token_ids` is older than this list, and apart from it."""
    return sorted(name for name in asked if name in KEYED and name != "token_ids")


def fields(kind: Literal["of_output", "of_request", "of_row"], asked: Iterable[str], *of: Any) -> dict[str, Any]:
    """Those fields of the columns that are asked for which an output, a request or a whole result has."""
    makers = (getattr(COLUMNS[name], kind) for name in asked)
    return {name: value for make in makers if make for name, value in make(*of).items()}
