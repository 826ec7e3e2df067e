"""Columns of a row of output that it has only if they are asked for. Each is said here, once.

A new one needs its name in COLUMNS, its value in one of the functions below, and a field of `RunOptions` with its name,
which makes the option. In a table of results, such columns stand behind those that every row has.
"""

from __future__ import annotations

from collections.abc import Container, Iterable
from typing import TYPE_CHECKING, Any

from cbatch.base.request import Request
from cbatch.base.units import rounded_s

if TYPE_CHECKING:
    from cbatch.requests.completion import Choice, Completion
    from cbatch.text.tokenizer import ChatTokenizer

OF_THE_MOMENT = ("cached_tokens", "ttft_s", "elapsed_s", "from_cache", "images_s")
"""Fields that no two runs have alike: those of `timings`, of which the last two are only there if there is reason."""

DROPPED = "dropped_prompt_tokens"
"""A field of rows whose prompt was cut, whether it is asked for or not."""

KEYED = ("token_ids", "echo_prompt")
"""Those that count in the key of a row, so that a run that resumes does not mix rows with and without them."""

COLUMNS = (*KEYED, "timings")
"""By the options of `cbatch run` that ask for them."""

OPTIONS = ", ".join(f"--{name.replace('_', '-')}" for name in KEYED)


def in_key(asked: Iterable[str]) -> list[str]:
    """The columns among these that count in a row's key. `token_ids` is older than this list, and apart from it."""
    return sorted(name for name in asked if name in KEYED and name != "token_ids")


def of_output(choice: Choice, asked: Container[str]) -> dict[str, Any]:
    """Fields of each output, which stand beside its text."""
    return {"token_ids": list(choice.token_ids)} if "token_ids" in asked else {}


def of_request(request: Request, tokenizer: ChatTokenizer | None) -> dict[str, Any]:
    """Fields of the request as it was encoded, which stand before `usage`.  tokenizer: the model's, if it has one

    `prompt_text` is what was tokenized: plain text, or a conversation through the chat template. Of ids, what they say.
    """
    if "echo_prompt" not in request.columns:
        return {}
    if request.text is not None and not request.dropped_tokens:
        return {"prompt_text": request.text}
    text = tokenizer.decode(request.prompt_ids, skip_special_tokens=False) if tokenizer is not None else None
    return {"prompt_text": text}


def of_row(completion: Completion, asked: Container[str]) -> dict[str, Any]:
    """Fields of the whole result, which stand behind everything else. Error rows have them, too."""
    if "timings" not in asked:
        return {}
    timing = completion.timing
    first, taken = timing.first_token_at, timing.taken_at
    ttft_s = rounded_s(first - taken) if first is not None else None
    elapsed_s, images_s = rounded_s(timing.finished_at - taken), rounded_s(completion.images_s) or False
    values = (completion.usage.cached_tokens, ttft_s, elapsed_s, completion.from_cache, images_s)
    return {name: value for name, value in zip(OF_THE_MOMENT, values, strict=True) if value is not False}
