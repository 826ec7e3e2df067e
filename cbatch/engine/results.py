"""From a step's logits to what each of its requests gets: a token, its log-probabilities, scores of the prompt."""

from __future__ import annotations

import math

from torch import Tensor

from cbatch.engine.errors import RequestError
from cbatch.engine.logprobs import token_logprobs
from cbatch.engine.plan import StepPlan, StepResult
from cbatch.engine.processors import Processors
from cbatch.engine.request import Request, Sample, TokenLogprobs
from cbatch.engine.sampler import fetch, sample
from cbatch.engine.spans import span
from cbatch.engine.structured import Masks

NAN = RequestError("nan_logits", "The model's output for this request is not a number.")
NOTHING_LEFT = RequestError(
    "invalid_row", "No token is left to choose from: bad_words, min_tokens or logit_bias forbid what the form needs."
)


def evaluate(
    plan: StepPlan,
    logits: Tensor,
    scored: Tensor | None,
    masks: Masks | None = None,
) -> StepResult:
    """Samples a token for each request of a step that gets one, and scores prompts.

    logits:  [R, V], rows in the order of the ragged batch
    scored:  [R] bool, which of them score prompts; None where none does
    masks:   what the forms of outputs leave, for requests that have a guide; None where none has
    """
    scores: list[list[TokenLogprobs]] = []
    if scored is not None:
        scores = _scores(plan, logits[scored])
        logits = logits[~scored]
    requests = plan.to_sample
    if not requests:
        return StepResult([], scores)
    guided = [row for row, request in enumerate(requests) if request.guide is not None]
    allowed = masks.allowed if masks is not None else None
    with span("sample"):
        processed = Processors.build(requests, logits.device).apply(logits, allowed, guided)
        sampled = sample(processed, requests)
    with span("land"):
        token_ids, largest = fetch(*sampled)
    logprobs = _logprobs(requests, logits, token_ids)
    wrong: list[RequestError | None] = [
        None if math.isfinite(value) else _what_is_wrong(logits[row]) for row, value in enumerate(largest)
    ]
    for row, sentence in zip(guided, masks.errors if masks is not None else (), strict=True):
        guide = requests[row].guide
        if sentence is not None:
            wrong[row] = RequestError("invalid_row", sentence)
        elif guide is not None and guide.is_finished:  # nothing is left because nothing more may come
            wrong[row] = None
    _mark_broken_scores(plan, scores, wrong)
    return StepResult([Sample(*row) for row in zip(token_ids, logprobs, wrong, strict=True)], scores)


def _what_is_wrong(logits: Tensor) -> RequestError:
    """Why no token can be chosen, by the row's raw logits [V]."""
    return NOTHING_LEFT if bool(logits.max().isfinite()) else NAN


def _scores(plan: StepPlan, logits: Tensor) -> list[list[TokenLogprobs]]:
    """Log-probabilities of the prompt tokens that follow the rows of logits [N, V], by slice."""
    token_ids, counts, lengths = [], [], []
    for slice_ in plan.to_score:
        places = slice_.to_score
        token_ids += slice_.request.token_ids[places.start + 1 : places.stop + 1]
        counts += [slice_.request.params.prompt_logprobs or 0] * len(places)
        lengths.append(len(places))
    found = iter(token_logprobs(logits, token_ids, counts))
    return [[next(found) for _ in range(length)] for length in lengths]


def _logprobs(requests: list[Request], logits: Tensor, token_ids: list[int]) -> list[TokenLogprobs | None]:
    """Log-probabilities of the tokens that were chosen, for requests that ask for them."""
    result: list[TokenLogprobs | None] = [None] * len(requests)
    rows = [row for row, request in enumerate(requests) if request.params.logprobs is not None]
    if rows:
        counts = [requests[row].params.logprobs or 0 for row in rows]
        found = token_logprobs(logits[rows], [token_ids[row] for row in rows], counts)
        for row, one in zip(rows, found, strict=True):
            result[row] = one
    return result


def _mark_broken_scores(plan: StepPlan, scores: list[list[TokenLogprobs]], wrong: list[RequestError | None]) -> None:
    """A prompt with a score that is not a number, in this chunk or an earlier one, has none at all."""
    now = {slice_.request: found for slice_, found in zip(plan.to_score, scores, strict=True)}
    for row, request in enumerate(plan.to_sample):
        if (
            request.scores_prompt
            and request.num_generated == 0
            and any(math.isnan(one.logprob) for one in (*request.scored, *now.get(request, ())))
        ):
            wrong[row] = NAN
