"""Texts that are cut to a number of tokens."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from cbatch.base.errors import RequestError

GAP = "\n[…]\n"
"""Stands where the middle of a text was, so that the model does not read its ends as one sentence."""


def fit_text(
    text: str, limit: int, side: str, *, starts: Callable[[str], Sequence[int]], count: Callable[[str], int]
) -> tuple[str, int]:
    """A text, cut as little as makes its prompt fit, and how many of its tokens were dropped.

    limit:  most tokens of the prompt; `side`: what of the text is dropped, `left`, `right` or `middle`
    starts: gives the character at which each token of a text begins (see `ChatTokenizer.token_starts`)
    count:  gives the tokens of the whole prompt with a text in this one's place

    Raises RequestError (`prompt_too_long`) if the prompt does not fit with a single token of the text.
    """
    at = starts(text)
    keep = min(len(at), limit)
    while keep > 0:
        shown = text if keep == len(at) else _cut(text, at, keep, side)
        if (excess := count(shown) - limit) <= 0:
            return shown, len(at) - keep
        keep -= excess
    raise RequestError("prompt_too_long", f"What surrounds the text has more than {limit - 1:,} tokens.")


def _cut(text: str, starts: Sequence[int], keep: int, side: str) -> str:
    tail = {"left": keep, "right": 0}.get(side, keep // 2)
    beginning = text[: starts[keep - tail]] if keep > tail else ""
    return beginning + (GAP if side == "middle" else "") + (text[starts[len(starts) - tail] :] if tail else "")


def cut_ids(token_ids: Sequence[int], keep: int, side: str) -> Sequence[int]:
    """The token ids of a prompt, without so many on a side that `keep` are left."""
    tail = {"left": keep, "right": 0}.get(side, keep // 2)
    return [*token_ids[: keep - tail], *token_ids[len(token_ids) - tail :]]
