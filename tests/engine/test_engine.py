"""The engine's promises: how outputs end, that other requests change nothing, that nothing leaks."""

from __future__ import annotations

import asyncio
import gc
import weakref
from functools import cache
from itertools import count
from typing import Any

import pytest
import torch

from cbatch.api import LLM, Engine
from cbatch.base.config import EngineConfig
from cbatch.base.errors import RequestError
from cbatch.base.params import SamplingParams
from cbatch.engine.stats import StepRecord
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.schedule.step_time import MIN_PREFILL_TOKENS, StepTimeController
from tests.support.generation import generate
from tests.support.tiny_models import VOCABULARY, loaded, make_engine, make_network, make_prompts


@cache
def network() -> Any:
    return make_network("llama")


def greedy(prompt: list[int], count: int) -> list[int]:
    return list(generate(make_engine(network()), [prompt], SamplingParams(max_tokens=count))[0].token_ids)


@pytest.fixture
def prompt() -> list[int]:
    return make_prompts([9])[0]


def test_an_end_token_ends_the_output_and_counts(prompt: list[int]) -> None:
    """Guards the end of an output: `stop`, with the end token in token_ids; and ignore_eos, with which it goes on."""
    tokens = greedy(prompt, 12)
    config = EngineConfig(block_size=4, kv_blocks=64, device="cpu")
    engine = SteppingEngine(config, loaded(network(), eos_ids=frozenset([tokens[5]])))
    asked = [SamplingParams(max_tokens=12, ignore_eos=ignored) for ignored in (False, True)]
    done, whole = generate(engine, [prompt] * 2, asked)
    assert done.finish_reason == "stop" and done.token_ids == tokens[: tokens.index(tokens[5]) + 1]
    assert whole.finish_reason == "length" and whole.token_ids == tokens


def test_stop_token_ids_and_min_tokens(prompt: list[int]) -> None:
    """Guards that a stop token ends the output, but not before min_tokens."""
    tokens = greedy(prompt, 12)
    engine = make_engine(network())
    asked = SamplingParams(max_tokens=12, stop_token_ids=(tokens[0],))
    assert generate(engine, [prompt], asked)[0].token_ids == tokens[:1]
    later = generate(engine, [prompt], asked.merged({"min_tokens": 6}))[0]
    assert len(later.token_ids) >= 6 and tokens[0] not in later.token_ids[:5]


def test_max_tokens_is_clamped_to_context_and_cache(prompt: list[int]) -> None:
    """Guards against writing past the context or the cache: the output ends with `length`."""
    long = generate(make_engine(network(), kv_blocks=100), [prompt], SamplingParams(max_tokens=None))[0]
    assert long.finish_reason == "length" and len(long.token_ids) == 160 - 9
    small = generate(make_engine(network(), kv_blocks=5), [prompt], SamplingParams(max_tokens=None))[0]
    assert len(small.token_ids) == 5 * 4 + 1 - 9 and small.token_ids == long.token_ids[:12]


def test_bad_prompts_fail_alone() -> None:
    """Guards the other prompts beside a bad one."""
    good = make_prompts([5])[0]
    outputs = generate(
        make_engine(network()), [[], good, [VOCABULARY], [1] * 500, [-1], "text"], SamplingParams(max_tokens=4)
    )
    codes = [output.error.code if output.error else None for output in outputs]
    assert codes == ["invalid_row", None, "invalid_row", "prompt_too_long", "invalid_row", "invalid_row"]
    assert outputs[1].token_ids == greedy(good, 4)


def test_a_common_beginning_is_computed_once() -> None:
    """Guards a system prompt that many requests share: only one of them computes it."""
    engine = make_engine(network(), max_batch_tokens=64)
    trunk = make_prompts([41])[0]
    sizes: list[int] = []
    forward = engine.runner.forward
    engine.runner.forward = lambda batch: (sizes.append(len(batch.ids)), forward(batch))[1]  # type: ignore[method-assign]
    outputs = generate(engine, [[*trunk, tail] for tail in range(1, 7)], SamplingParams(max_tokens=1))
    assert sizes == [42 + 5 * 2], "each of the others computes what is behind the last full block"
    assert [output.usage.cached_tokens for output in outputs] == [0] + [40] * 5
    again = generate(engine, [[*trunk, 1]], SamplingParams(max_tokens=1))[0]
    assert again.usage.cached_tokens == 40 and again.token_ids == outputs[0].token_ids
    uncached = make_engine(network(), prefix_cache=False)
    outputs = generate(uncached, [[*trunk, tail] for tail in range(1, 7)], SamplingParams(max_tokens=1))
    assert {output.usage.cached_tokens for output in outputs} == {0}


def test_limits_and_stats() -> None:
    """Guards what front ends show and decide by: the requested sizes, and the counts of the requests."""
    engine = make_engine(network(), kv_blocks=40, block_size=4, max_seqs=2, max_batch_tokens=64)
    limits = engine.limits
    assert (limits.max_seqs, limits.max_batch_tokens, limits.max_model_len) == (2, 64, engine.model.max_model_len)
    assert (limits.block_size, limits.num_blocks, limits.cache_tokens) == (4, 40, 160)
    assert limits.sequence.longest == min(160, limits.max_model_len) and limits.blocks_for(9) == 3
    assert limits.kv_bytes_per_token * 160 == sum(
        tensor.nbytes for tensor in (*engine.runner.kv_cache.keys, *engine.runner.kv_cache.values)
    )
    for prompt in make_prompts([9, 5, 6]):
        engine.add(prompt, SamplingParams(max_tokens=3))
    engine.step()
    stats = engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_steps) == (2, 1, 1)
    assert stats.used_blocks == 3 + 2 and stats.cache_used == 5 / 40 and stats.held_back["slots"] == 1
    while engine.has_work:
        engine.step()
    stats = engine.stats()
    assert stats.num_prompt_tokens == 20 and stats.num_cached_tokens == 0 == stats.used_blocks == stats.num_preemptions


def test_each_step_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards measurements: one record for each run of the model, with its chunks and its time."""
    ticks = count()
    monkeypatch.setattr("cbatch.engine.loop.clock", lambda: float(next(ticks)))
    engine = make_engine(network(), block_size=4, max_batch_tokens=8)
    records: list[StepRecord] = []
    engine.on_step = records.append
    expected = [greedy(prompt, 3) for prompt in make_prompts([5, 6])]
    assert [done.token_ids for done in generate(engine, make_prompts([5, 6]), SamplingParams(max_tokens=3))] == expected
    chunks = [[(chunk.sequence.id, chunk.start, chunk.stop) for chunk in one.scheduled.chunks] for one in records]
    assert chunks[:2] == [[(0, 0, 5), (1, 0, 3)], [(0, 5, 6), (1, 3, 6)]] and len(records) == engine.stats().num_steps
    assert [(one.start, one.end) for one in records[:2]] == [(0, 1), (2, 3)]
    assert [one.used_blocks for one in records[:2]] == [4, 4] and all(one.seconds == 1 for one in records)
    engine.on_step = None
    generate(engine, make_prompts([5]), SamplingParams(max_tokens=1))
    assert len(records) == len(chunks)


def test_a_request_that_becomes_nan_fails_alone_and_leaves_nothing() -> None:
    """Guards requests beside one whose logits become NaN, and those that get its blocks."""
    network, poison = make_network("llama"), 7
    with torch.no_grad():
        network.model.embed_tokens.weight[poison] = float("nan")
    engine = make_engine(network, kv_blocks=8)
    sick, healthy = [poison] * 30, [token for token in make_prompts([28])[0] if token != poison]
    outputs = generate(engine, [sick, healthy[:2]], SamplingParams(max_tokens=3))
    assert outputs[0].error is not None and outputs[0].error.code == "nan_logits"
    assert not engine.runner.kv_cache.values[0].isfinite().all(), "the fault did not reach the cache"
    roomy, params = make_engine(network, prefix_cache=False, max_batch_tokens=64), SamplingParams(max_tokens=3)
    (broken, beside), (alone,) = (generate(roomy, one, params) for one in ([sick, healthy[:2]], [healthy[:2]]))
    assert broken.error is not None and beside.token_ids == alone.token_ids != []
    expected = generate(make_engine(network), [healthy], SamplingParams(max_tokens=4))[0]
    after = generate(engine, [healthy], SamplingParams(max_tokens=4))[0]
    assert after.error is None and after.token_ids == expected.token_ids and engine.scheduler.pool.num_used == 0


def test_a_target_time_limits_prompts_and_changes_no_token(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards --target-step-ms end to end: step times are learnt, limits are kept, outputs stay the same."""
    seen: list[tuple[int, int, float]] = []
    observe = StepTimeController.observe

    def watch(self: StepTimeController, decode_rows: int, prompt_tokens: int, seconds: float) -> int | None:
        seen.append((decode_rows, prompt_tokens, seconds))
        return observe(self, decode_rows, prompt_tokens, seconds)

    monkeypatch.setattr(StepTimeController, "observe", watch)
    prompts, lengths = make_prompts([5, 40, 23]), [30, 4, 4]
    params = [SamplingParams(max_tokens=length) for length in lengths]
    expected = generate(make_engine(network(), max_batch_tokens=16), prompts, params)
    assert not seen, "without a target nothing is measured"
    limited = make_engine(network(), max_batch_tokens=16, target_step_ms=1e-6)
    done = generate(limited, prompts, params)
    assert [one.token_ids for one in done] == [one.token_ids for one in expected]
    mixed = [tokens for rows, tokens, _ in seen if rows and tokens]
    assert len(mixed) > 10 and set(mixed[:-1]) == {MIN_PREFILL_TOKENS["cpu"]}
    assert all(seconds > 0 for _, _, seconds in seen)


BAD_PROMPTS: list[Any] = [
    object(),
    {"prompt_token_ids": [3, 4], "max_tokens": -1},
    {"prompt_token_ids": [3, 4], "regex": "("},
    {"prompt_token_ids": [VOCABULARY]},
    [3] * 10_000,
]


def test_an_error_in_a_result_keeps_no_engine(prompt: list[int]) -> None:
    """Guards the memory of a notebook that keeps results and loads another model: tracebacks held the old engine."""
    engine = Engine(EngineConfig(block_size=4, kv_blocks=64, device="cpu"), loaded=loaded(network()))
    was, core = weakref.ref(engine), weakref.ref(engine.core)
    results = engine.generate([prompt, *BAD_PROMPTS], {"max_tokens": 2})
    events = list(engine.stream(BAD_PROMPTS, {"max_tokens": 2}))
    del engine
    gc.collect()
    assert was() is None and core() is None
    assert [one.finish_reason for one in (*results[1:], *events)] == ["error"] * 10


@pytest.mark.parametrize("how", ["read", "closed", "left"])
@pytest.mark.parametrize("is_async", [False, True])
def test_a_stream_that_has_ended_keeps_no_engine(how: str, is_async: bool, prompt: list[int]) -> None:
    """Guards the memory of a notebook in which the names of old streams are still bound."""
    engine = Engine(EngineConfig(block_size=4, kv_blocks=64, device="cpu"), loaded=loaded(network()))
    was = weakref.ref(engine)
    stream: Any = engine.astream(prompt, {"max_tokens": 3}) if is_async else engine.stream(prompt, {"max_tokens": 3})

    async def read() -> None:
        if how == "left":
            async with stream:
                await anext(stream)
        elif how == "closed":
            await stream.aclose()
        assert len([event async for event in stream]) == 3 * (how == "read")

    if is_async:
        asyncio.run(read())
    else:
        if how == "left":
            with stream:
                next(stream)
        elif how == "closed":
            stream.close()
        assert len(list(stream)) == 3 * (how == "read")
    del engine
    gc.collect()
    assert was() is None


def test_options_of_a_chat() -> None:
    """Guards against options that are taken in silence, as columns of the row; fields for tools reach its check."""
    with Engine(EngineConfig(kv_blocks=64, device="cpu"), loaded=loaded(network())) as engine:
        chat: Any = engine.chat
        with pytest.raises(TypeError, match=r"Engine.chat has no argument 'toolz'; did you mean tools"):
            chat("Hi", toolz=[])
        with pytest.raises(RequestError, match="parallel_tool_calls must be true or false"):
            chat("Hi", parallel_tool_calls=3)


def test_names_of_other_libraries() -> None:
    """Guards programs of vLLM and llama-cpp-python: the names that they look for give what stands here."""
    with LLM() as llm:
        (result,) = llm.generate(["Hi"], SamplingParams(max_tokens=3))
        answer = llm.create_chat_completion([{"role": "user", "content": "Hi"}], max_tokens=3)
        assert answer["object"] == "chat.completion" and answer["choices"][0]["message"]["content"] == result.text
        assert result.outputs[0].text == result.text and llm.get_tokenizer() is llm.tokenizer
        assert llm.detokenize(llm.tokenize(" lamp")) == llm.detokenize(llm.tokenize(b" lamp")) == " lamp"
        assert llm.n_ctx == llm.limits.max_model_len
        with pytest.raises(RequestError, match="max_tokens"):
            llm.create_chat_completion([{"role": "user", "content": "Hi"}], max_tokens=-5)
        generate, three = llm.generate, SamplingParams(max_tokens=3)
        same = [
            generate("Hi", max_tokens=3),
            generate("Hi", sampling_params=three, use_tqdm=False),
            generate(["Hi"], SamplingParams(), max_tokens=3)[0],
            generate(["Hi"], [{"max_tokens": 9}], max_tokens=3)[0],
            llm.chat("Hi", max_new_tokens=3),
            next(event for event in llm.stream("Hi", max_tokens=3) if event.completion).completion,
        ]
        assert same == [result] * len(same)
