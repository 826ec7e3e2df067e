"""Requests for more than text, on a real engine: log-probabilities, scores, several outputs, echo."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from cbatch.api import Engine
from cbatch.base.config import EngineConfig
from cbatch.base.errors import RequestError
from cbatch.base.params import SamplingParams
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.runtime.batch import Logits
from cbatch.text.detokenizer import IncrementalDetokenizer
from tests.support.generation import generate
from tests.support.model_checks import reference_logits
from tests.support.model_folder import save_model
from tests.support.tiny_models import generate_alone, make_engine, make_network, make_prompts

LENGTHS = [3, 40, 17, 1, 25]


@cache
def network() -> Any:
    return make_network("llama")


@cache
def demo() -> Engine:
    return Engine(dtype="float32", device="cpu")


def plain_logprobs(token_ids: list[int]) -> torch.Tensor:
    """Log-probabilities [T, V] by the model's own forward: row t is of the token that follows t."""
    return reference_logits(network(), [token_ids])[0].float().log_softmax(-1)


SETTINGS: list[dict[str, Any]] = [
    {"max_batch_tokens": 256},
    {"max_batch_tokens": 7},
    {"kv_blocks": 14, "max_batch_tokens": 32},
]


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_logprobs_are_those_of_a_plain_forward(settings: dict[str, Any]) -> None:
    """Guards values and places, chunked and preempted, whatever changes the choice of tokens."""
    engine = make_engine(network(), **settings)
    asked = [
        SamplingParams(max_tokens=12, logprobs=3, prompt_logprobs=2, temperature=heat, seed=1, repetition_penalty=1.2)
        for heat in (0.0, 1.0, 0.7, 1.0, 0.0)
    ]
    prompts = make_prompts(LENGTHS)
    outputs = generate(engine, prompts, asked)
    assert (engine.stats().num_preemptions > 0) == ("kv_blocks" in settings)
    for prompt, output in zip(prompts, outputs, strict=True):
        expected = plain_logprobs([*prompt, *output.token_ids])
        assert output.prompt_logprobs is not None and output.logprobs is not None
        assert len(output.logprobs) == len(output.token_ids) == 12
        first, *others = output.prompt_logprobs
        assert (first.token_id, first.logprob, first.top) == (prompt[0], None, ())
        for place, one in enumerate([*others, *output.logprobs]):
            assert one.token_id == [*prompt, *output.token_ids][place + 1] and one.logprob is not None
            assert abs(one.logprob - float(expected[place, one.token_id])) < 1e-5
            assert len(one.top) == (2 if place < len(prompt) - 1 else 3)
            values = expected[place].topk(len(one.top)).values.tolist()
            assert all(abs((a.logprob or 0) - b) < 1e-5 for a, b in zip(one.top, values, strict=True))


def test_scoring_generates_nothing() -> None:
    """Guards perplexity runs: max_tokens 0, a prompt as long as the context, beside rows that generate."""
    engine = make_engine(network(), max_batch_tokens=64)
    prompts = make_prompts([160, 9, 1])
    score = SamplingParams(max_tokens=0, prompt_logprobs=0)
    first, plain, single = generate(engine, prompts, [score, SamplingParams(max_tokens=5), score])
    assert first.finish_reason == "length" and first.token_ids == [] and first.prompt_logprobs is not None
    expected = plain_logprobs(prompts[0])
    total = sum(float(expected[place, token]) for place, token in enumerate(prompts[0][1:]))
    assert abs(math.fsum(one.logprob or 0 for one in first.prompt_logprobs) - total) < 1e-3
    assert len(first.prompt_logprobs) == 160 and len(plain.token_ids) == 5
    assert [(one.token_id, one.logprob) for one in single.prompt_logprobs or ()] == [(prompts[2][0], None)]
    assert engine.scheduler.pool.num_used == 0


def test_broken_logits_are_no_scores() -> None:
    """Guards against NaN as a log-probability, where only an early part of the prompt is broken."""
    model = make_network("llama")
    engine = make_engine(model, max_batch_tokens=8)
    forward = engine.runner.forward

    def broken(batch: Any) -> Logits:
        logits = forward(batch).values.clone()
        if 0 in batch.starts:
            logits[0] = math.nan
        return Logits(logits)

    engine.runner.forward = broken  # type: ignore[method-assign]
    (scored,) = generate(engine, make_prompts([30]), SamplingParams(max_tokens=0, prompt_logprobs=0))
    assert scored.error is not None and scored.error.code == "nan_logits"


def test_several_outputs_share_their_prompt() -> None:
    """Guards `n`: each output is what its own sample number gives alone, and the prompt is computed once."""
    engine = make_engine(network(), max_batch_tokens=64)
    prompt = make_prompts([33])[0]
    asked = SamplingParams(max_tokens=8, temperature=1.0, seed=5, n=4)
    (output,) = generate(engine, [prompt], asked)
    assert len({tuple(one.token_ids) for one in output.choices}) == 4
    assert all(one.finish_reason == "length" for one in output.choices)
    scheduler = engine.scheduler
    assert (scheduler.num_prompt_tokens, scheduler.num_cached_tokens) == (4 * 33, 3 * 32)
    assert output.usage.to_dict() == {"prompt_tokens": 33, "completion_tokens": 32, "total_tokens": 65}
    fresh = make_engine(network(), prefix_cache=False, max_seqs=1)
    request_id = fresh.add(prompt, asked)
    found: list[list[int]] = [[], [], [], []]
    while fresh.has_work:
        (event,) = fresh.step()
        assert event.request_id == request_id and event.token_id is not None and event.cached_tokens == 0
        found[event.sample_index].append(event.token_id)
    assert found == [one.token_ids for one in output.choices]
    (single,) = generate(fresh, [prompt], asked.merged({"n": 1}))
    assert single.token_ids == found[0]


@pytest.mark.parametrize("heat", [0.0, 1.0])
def test_penalties_see_what_was_generated(heat: float) -> None:
    """Guards the wiring: a strong presence penalty forbids what was said before, on a model that repeats itself."""
    engine = demo()
    plain = SamplingParams(max_tokens=30, ignore_eos=True, temperature=heat, seed=3)
    often, once = engine.generate(["Tell me a story."] * 2, [plain, plain.merged({"presence_penalty": 2.0})])
    assert len(set(once.token_ids)) > len(set(often.token_ids))
    (biased,) = engine.generate(["Tell me a story."], plain.merged({"logit_bias": {"40": 100}}))
    assert set(biased.token_ids) == {40}


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_allowed_tokens_are_those_of_generate(settings: dict[str, Any]) -> None:
    """Guards allowed_token_ids against transformers, chunked and preempted, beside rows without a list."""
    engine, prompts = make_engine(network(), **settings), make_prompts(LENGTHS)
    allowed = list(range(5, 80, 7))
    plain, listed = SamplingParams(max_tokens=12), SamplingParams(max_tokens=12, allowed_token_ids=allowed)
    outputs = generate(engine, prompts * 2, [plain] * len(prompts) + [listed] * len(prompts))
    assert [one.token_ids for one in outputs[:5]] == [one.token_ids for one in generate(engine, prompts, plain)]
    expected = generate_alone(network(), prompts, [12] * 5, prefix_allowed_tokens_fn=lambda batch, ids: allowed)
    assert [one.token_ids for one in outputs[5:]] == expected


def test_an_end_token_must_be_allowed_too() -> None:
    """Guards an output that would stop at a token outside of the list, and logprobs, which see no list."""
    engine = demo()
    (end,) = engine.loaded.eos_ids
    (answer,) = engine.generate(["What is 2 plus 3?"], SamplingParams(max_tokens=40, logprobs=0))
    assert answer.token_ids[-1] == end and answer.finish_reason == "stop"
    text = answer.token_ids[:-1]
    params = SamplingParams(max_tokens=40, allowed_token_ids=text, logprobs=0)
    cut, whole = engine.generate(
        ["What is 2 plus 3?"] * 2, [params, params.merged({"allowed_token_ids": [*text, end]})]
    )
    assert cut.token_ids[: len(text)] == text and len(cut.token_ids) == 40 and cut.finish_reason == "length"
    assert {*cut.token_ids} <= {*text} and whole.token_ids == answer.token_ids
    assert cut.logprobs is not None and answer.logprobs is not None
    assert whole.logprobs == answer.logprobs == [*cut.logprobs[: len(text)], answer.logprobs[-1]]


def test_text_that_a_form_forces_is_spelt_in_allowed_tokens() -> None:
    """Guards allowed tokens against those that the tokenizer would take for the text of a form."""
    pytest.importorskip("llguidance", reason="the extra `structured` is not installed")
    tokenizer = demo().tokenizer
    assert tokenizer is not None
    letters = [token for letter in "then " if (token := tokenizer.backend.token_to_id(letter.replace(" ", "Ġ")))]
    made = demo().generate("Hi", SamplingParams(choice=["then the hen"], allowed_token_ids=letters, max_tokens=20))
    assert made.error is None and made.text == "then the hen" and set(made.token_ids) <= set(letters)


def test_allowed_tokens_and_a_constraint_hold_at_once() -> None:
    """Guards a constraint that the list narrows, ends without an end token, or cannot meet."""
    engine, encode = demo(), demo().tokenizer.encode  # type: ignore[union-attr]
    letters = [token for letter in "abcdef" for token in encode(letter)]
    asked = SamplingParams(regex="[a-z]{6}", temperature=2.0, n=4)
    kept, free, impossible = engine.generate(
        ["Say a word."] * 3,
        [
            asked.merged({"allowed_token_ids": letters}),
            asked,
            asked.merged({"allowed_token_ids": encode("!")}),
        ],
    )
    assert all(len(one.text) == 6 and {*one.text} <= {*"abcdef"} for one in kept.choices)
    assert kept.finish_reason == "stop" and not all({*one.text} <= {*"abcdef"} for one in free.choices)
    assert impossible.error is not None and impossible.error.code == "invalid_row"
    assert "No token is left" in str(impossible.error) and "allowed_token_ids" in str(impossible.error)


def test_a_list_of_what_the_model_never_says_is_no_broken_model() -> None:
    """Guards the error of logits that are minus infinity on the whole list: the request is at fault, and alone."""
    engine = make_engine(network())
    forward = engine.runner.forward

    def without_seven(batch: Any) -> Logits:
        logits = forward(batch).values.clone()
        logits[:, 7] = -math.inf
        return Logits(logits)

    engine.runner.forward = without_seven  # type: ignore[method-assign]
    asked = [SamplingParams(max_tokens=2, allowed_token_ids=ids) for ids in ([7], [7, 8])]
    never, other = generate(engine, [[1, 2]] * 2, asked)
    assert never.error is not None and "No token is left" in str(never.error) and other.token_ids == [8, 8]


def test_echo_stands_before_the_text_and_is_no_stop() -> None:
    """Guards echo: at once with the first token, alone with max_tokens 0, and never taken for a stop string."""
    engine = demo()
    prompt = engine.tokenizer.encode("What is 2 plus 3?")  # type: ignore[union-attr]
    params = SamplingParams(max_tokens=6, stop=["What"])
    (plain,) = engine.generate([prompt], params)
    (echoed,) = engine.generate([prompt], params.merged({"echo": True}))
    assert echoed.text == "What is 2 plus 3?" + plain.text and echoed.token_ids == plain.token_ids
    (alone,) = engine.generate([prompt], params.merged({"echo": True, "max_tokens": 0}))
    assert alone.text == "What is 2 plus 3?" and alone.finish_reason == "length"


@pytest.mark.parametrize("token_id", [-1, 2**40])
def test_echo_of_a_token_that_does_not_exist_fails_alone(token_id: int) -> None:
    """Guards the other prompts: the tokenizer raises for such ids, so it must not see them before they are refused."""
    engine = demo()
    prompt = engine.tokenizer.encode("What is 2 plus 3?")  # type: ignore[union-attr]
    wrong, right = engine.generate([[token_id], prompt], SamplingParams(max_tokens=1, echo=True))
    assert wrong.error is not None and wrong.error.code == "invalid_row"
    assert right.error is None and right.text.startswith("What is 2 plus 3?")


def test_special_tokens_are_shown_where_asked() -> None:
    """Guards skip_special_tokens: the tokens are the same, the text has their names."""
    engine = demo()
    special = next(iter(engine.loaded.eos_ids))
    params = SamplingParams(max_tokens=3, logit_bias={special: 100}, ignore_eos=True)
    hidden, shown = engine.generate(["Hi"] * 2, [params, params.merged({"skip_special_tokens": False})])
    name = engine.tokenizer.backend.id_to_token(special)  # type: ignore[union-attr]
    assert hidden.text == "" and shown.text == 3 * name and hidden.token_ids == shown.token_ids


def test_steps_make_no_text_but_to_find_stop_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the time of a step, which is everybody's: text is made by whoever reads the events."""
    engine = SteppingEngine(EngineConfig(device="cpu"), demo().loaded)
    detokenized: list[int] = []
    push, push_all = IncrementalDetokenizer.push, IncrementalDetokenizer.push_all

    def counted(self: IncrementalDetokenizer, token_id: int, *, may_stop: bool = True) -> str:
        detokenized.append(token_id)
        return push(self, token_id, may_stop=may_stop)

    def counted_all(self: IncrementalDetokenizer, token_ids: list[int]) -> str:
        detokenized.extend(token_ids)
        return push_all(self, token_ids)

    monkeypatch.setattr(IncrementalDetokenizer, "push", counted)
    monkeypatch.setattr(IncrementalDetokenizer, "push_all", counted_all)
    prompt, params = engine.encode("Tell me a story."), SamplingParams(max_tokens=9, ignore_eos=True)
    engine.add(prompt, params)
    while engine.has_work:
        assert {event.text for event in engine.step()} == {""}
    assert not detokenized
    engine.add(prompt, params.merged({"stop": ["never said"]}))
    texts = []
    while engine.has_work:
        texts += [event.text for event in engine.step()]
    assert len(detokenized) == 9
    assert "".join(texts) == generate(engine, [prompt], params)[0].text and len(detokenized) == 18


def test_settings_of_the_model_s_folder_hold(tmp_path: Path) -> None:
    """Guards generation_config.json: penalty and limits as `generate` applies them."""
    settings = {"repetition_penalty": 1.3, "max_new_tokens": 9, "min_new_tokens": 4, "num_beams": 3, "min_length": 2}
    engine = Engine(save_model(tmp_path / "m", generation=settings), device="cpu")
    assert set(engine.loaded.not_applied) == {"num_beams", "min_length"} and engine.loaded.defaults.min_tokens == 4
    prompts = [[5, 9, 5, 9, 30], [7] * 12]
    outputs = engine.generate(prompts, engine.loaded.defaults.merged({"ignore_eos": True}))
    expected = generate_alone(engine.loaded.network, prompts, [9, 9], num_beams=1, repetition_penalty=1.3)
    assert [one.token_ids for one in outputs] == expected


@pytest.mark.parametrize(
    "asked, message",
    [
        ({"logit_bias": {"89": 1}}, "logit_bias: 89 is not in the model's vocabulary"),
        ({"allowed_token_ids": [5, 89]}, "allowed_token_ids: 89 is not in the model's vocabulary"),
        ({"allowed_token_ids": [7], "min_tokens": 1, "stop_token_ids": [7]}, "No token is left"),
        ({"bad_words": ["x"]}, "bad_words needs a tokenizer"),
        ({"echo": True}, "echo needs a tokenizer"),
    ],
)
def test_what_the_model_cannot_do_is_refused(asked: dict[str, Any], message: str) -> None:
    """Guards the step against entries that no logit has, and against features that would do nothing."""
    (output,) = generate(make_engine(network()), [[1, 2]], SamplingParams(max_tokens=2).merged(asked))
    assert output.error is not None and message in str(output.error)


@pytest.mark.parametrize(
    "params", [{"regex": "["}, {"grammar": "start: x"}, {"guided_json": {"type": "foo"}}, SamplingParams(regex="(")]
)
def test_a_constraint_that_cannot_be_compiled_raises_at_once(params: Any) -> None:
    """Guards programs against an empty text instead of the error of their own pattern."""
    pytest.importorskip("llguidance", reason="the extra `structured` is not installed")
    for call in (lambda: demo().generate(["a", "b"], params), lambda: list(demo().stream("a", params))):
        with pytest.raises(RequestError, match="cannot be used"):
            call()


def test_a_token_that_closes_a_form_has_its_own_log_probability() -> None:
    """Guards the token that takes the place of a sampled one: its log-probability is the model's, as of any other."""
    pytest.importorskip("llguidance", reason="the extra `structured` is not installed")
    with SteppingEngine(EngineConfig(dtype="float32", device="cpu")) as engine:
        assert engine.tokenizer is not None
        opening = engine.tokenizer.backend.token_to_id("<")
        assert opening is not None
        params = SamplingParams(
            regex=r"([a-z ]|<[0-9]{9}>)*\.", max_tokens=6, logprobs=3, logit_bias={opening: 100}, close_forms=True
        )
        (made,) = generate(engine, ["Hi"], params)
        assert made.choices[0].closed and made.text.endswith(".") and "<" not in made.text
        prompt = engine.encode("Hi")
        scored = SamplingParams(prompt_logprobs=0, max_tokens=1)
        (again,) = generate(engine, [[*prompt, *made.token_ids]], scored)
        wanted = [one.logprob for one in (again.prompt_logprobs or ())[len(prompt) :]]
        found = made.choices[0].logprobs or ()
        assert [one.token_id for one in found] == list(made.token_ids)
        assert [one.logprob for one in found] == pytest.approx(wanted, abs=1e-4)
