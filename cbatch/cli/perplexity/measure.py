"""Windows of texts, and what models make of them: perplexity, and the divergence of one model from another."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import Any, NamedTuple

import torch
from torch import Tensor

from cbatch.api import Engine
from cbatch.base.chat_template_options import TemplateOptions
from cbatch.base.errors import EngineError, RequestError, invalid_row
from cbatch.base.strict_json import parse_json_object
from cbatch.batch.lines import BOM, Line, place_of, read_lines

MAX_ELEMENTS = 2**24
"""Most probabilities of each model that are compared at once: 64 MiB."""


class Window(NamedTuple):
    """Tokens that a model reads with nothing before them; those from `start` on are scored."""

    ids: Sequence[int]
    start: int


def halved_windows(ids: Sequence[int], context: int, bos: Sequence[int]) -> Iterator[Window]:
    """Windows side by side, of which the second half is scored, as llama.cpp has them: BOS replaces the first token."""
    for begin in range(0, len(ids) - context + 1, context):
        yield Window([*bos, *ids[begin + len(bos) : begin + context]], context // 2 + 1)


def strided_windows(ids: Sequence[int], context: int, stride: int) -> Iterator[Window]:
    """Windows that begin every `stride` tokens, of which those are scored that no earlier one has.

    https://huggingface.co/docs/transformers/perplexity
    """
    for begin in range(0, max(len(ids) - context + stride, 1), stride):
        window = Window(ids[begin : begin + context], max(context - stride, 1) if begin else 1)
        if window.start < len(window.ids):
            yield window


def text_windows(engine: Engine, data: bytes, context: int, stride: int | None) -> Iterator[Window]:
    """The windows of a text. Raises RequestError if it cannot be encoded."""
    ids = engine.encode(Line(0, data.removeprefix(BOM)).text("The text"), raw=True)
    if stride is not None:
        return strided_windows(ids, context, stride)
    bos = engine.encode("", raw=True)[:1]  # or EOS, if it is put behind texts
    return halved_windows(ids, context, bos if ids[:1] == bos else [])


def row_windows(engine: Engine, data: bytes, context: int, stride: int, errors: list[RequestError]) -> Iterator[Window]:
    """The windows of rows of JSON Lines, each for itself.  errors: gets those of rows that have none"""
    for line in read_lines(BytesIO(data)):
        where = place_of(line.index, "line")
        try:
            row = parse_json_object(line.text(where), where, "a row")
            prompt = next((row[name] for name in ("text", "prompt", "prompt_token_ids") if name in row), row)
            is_ids = isinstance(prompt, list) and {type(one) for one in prompt} == {int}
            if not is_ids and not isinstance(prompt, str | dict):
                raise invalid_row("text or prompt must be a text, and prompt_token_ids a list of token ids")
            ids = engine.encode(prompt, raw=True, template=TemplateOptions(add_generation_prompt=False))
            if len(ids) < 2:
                raise invalid_row("there is no token to score")
        except RequestError as error:
            errors.append(RequestError(error.code, f"{where}: {str(error).removeprefix(f'{where}: ')}"))
        else:
            yield from strided_windows(ids, context, stride)


def score(engine: Engine, windows: Sequence[Window]) -> Tensor:
    """Negative log-probabilities [1, N] float64 of the scored tokens. Raises EngineError if there is none."""
    scores = engine.score([one.ids[: one.start] for one in windows], [one.ids[one.start :] for one in windows])
    if error := next((one.error for one in scores if one.error is not None), None):
        raise EngineError(f"A window cannot be scored: {error}")
    return -torch.tensor([[one.logprob for score in scores for one in score.tokens]], dtype=torch.float64)


def compare(tested: Engine, base: Engine, window: Window) -> Tensor:
    """Of the N scored tokens, [4, N] float64: what `score` gives with each model, and what `divergence` gives.

    All probabilities are in memory for the window with the base, and for one step with the tested model.
    """
    expected, found = list[Tensor](), list[Tensor]()
    base.core.on_scores = lambda logits, _: expected.append(torch.log_softmax(logits.float(), -1))
    nll = score(base, [window])
    rest = torch.cat(expected)

    def take(logits: Tensor, _: Tensor) -> None:
        nonlocal rest
        found.append(divergence(rest[: len(logits)], logits))
        rest = rest[len(logits) :]

    tested.core.on_scores = take
    return torch.cat([score(tested, [window]), nll, torch.cat(found, 1).cpu()])


def divergence(base: Tensor, logits: Tensor) -> Tensor:
    """Of a model with `logits` from one with log-probabilities `base`, both [N, vocabulary].

    Returns [2, N] float64: the Kullback-Leibler divergence in nats, and whether the likeliest tokens are the same.
    """
    size, found = max(MAX_ELEMENTS // base.shape[1], 1), []
    for at in range(0, len(base), size):
        one, other = base[at : at + size], torch.log_softmax(logits[at : at + size].float(), -1)
        nats = (one.exp() * (one - other)).sum(-1, dtype=torch.float64)
        found.append(torch.stack([nats, (one.argmax(-1) == other.argmax(-1)).double()]))
    return torch.cat(found, 1)


def figures(columns: Tensor) -> dict[str, Any]:
    """The figures of all columns of `score` or `compare`. `_error` are standard errors, None for a single token."""
    nll, *others = columns
    shown = _figure("perplexity", nll, is_exponent=True)
    if others:
        base, nats, same = others
        shown |= _figure("base_perplexity", base, is_exponent=True) | _figure("ratio", nll - base, is_exponent=True)
        shown |= _figure("kl_divergence", nats) | _figure("same_top", same)
        shown["logprob_difference"] = float((nll - base).abs().mean())
        shown["rms_probability_difference"] = float(((-nll).exp() - (-base).exp()).square().mean().sqrt())
    return shown | {"scored_tokens": len(nll)}


def _figure(name: str, values: Tensor, *, is_exponent: bool = False) -> dict[str, Any]:
    """The mean of values [N]; or its exponential, which at most is what JSON can hold."""
    mean, error = float(values.mean()), float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else None
    value = math.exp(min(mean, 700.0)) if is_exponent else mean
    return {name: value, f"{name}_error": error * value if is_exponent and error is not None else error}
