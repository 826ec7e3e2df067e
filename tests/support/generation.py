"""Runs prompts to their end on an engine that the test steps itself."""

from __future__ import annotations

from collections.abc import Sequence

from cbatch.base.errors import RequestError
from cbatch.base.params import SamplingParams
from cbatch.base.request import RequestDefaults
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.requests.completion import Completion
from cbatch.requests.output_processor import OutputProcessor
from cbatch.requests.prompts import PromptLike, read_prompt


def generate(
    engine: SteppingEngine,
    prompts: Sequence[PromptLike],
    params: SamplingParams | Sequence[SamplingParams],
) -> list[Completion]:
    """Works like `Engine.generate`, on the calling thread: for tests that look into the engine or count its steps.

    params:      for all prompts, or one for each

    All requests are added before the first step, so that every run has the same steps. Raises what a step raises, and
    EngineError if the engine is closed; the unfinished requests are cancelled then.
    """
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
    processor = engine.input_processor(RequestDefaults())
    results: list[Completion | OutputProcessor] = []
    running: dict[int, OutputProcessor] = {}
    try:
        for index, (prompt, asked) in enumerate(zip(prompts, each, strict=True)):
            request = processor.process(read_prompt(prompt, index, {}), lambda: b"", asked)
            if isinstance(request, Completion):
                results.append(request)
                continue
            results.append(outputs := engine.output_processor(request))
            try:
                running[engine.add_request(request)] = outputs
            except RequestError as error:
                outputs.fail(error)
        while any(not outputs.is_finished for outputs in running.values()):
            for event in engine.step():
                if event.request_id in running:
                    running[event.request_id].take(event)
    finally:
        for request_id in running:
            engine.cancel(request_id)
    return [result if isinstance(result, Completion) else result.completion() for result in results]


def generate_greedily(engine: SteppingEngine, prompts: Sequence[PromptLike], lengths: Sequence[int]) -> list[list[int]]:
    """The likeliest tokens after each prompt, so many; the scheduler's books are in order afterwards."""
    outputs = generate(engine, prompts, [SamplingParams(max_tokens=length) for length in lengths])
    engine.scheduler.check_integrity()
    return [list(output.token_ids) for output in outputs]
