"""Several prompts on one engine, from the first to the last token: what Python programs call."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

from cbatch.engine.base.errors import RequestError
from cbatch.engine.base.outputs import TokenEvent
from cbatch.engine.base.params import SamplingParams, derive_seed
from cbatch.engine.text.tokenizer import ChatTokenizer, Prompt


class Steppable(Protocol):
    """What is used of an engine here (see `engine.Engine`)."""

    tokenizer: ChatTokenizer | None

    def encode(self, prompt: Prompt) -> list[int]: ...

    def add(
        self, prompt: Prompt, params: SamplingParams, *, seed: int, sample_index: int, tags: Sequence[str]
    ) -> int: ...

    def step(self) -> list[TokenEvent]: ...

    def cancel(self, request_id: int) -> None: ...


class Generation:
    """Prompts that an engine completes side by side, and the events that come of them."""

    def __init__(self, engine: Steppable) -> None:
        self._engine = engine
        self._indices: dict[int, int] = {}
        """Of the prompt, by the id of the request."""
        self._echoes: dict[int, str] = {}
        """What is to stand before a request's first text."""

    def add(self, index: int, prompt: Prompt, params: SamplingParams) -> None:
        """Queues as many requests as the parameters ask for. Raises RequestError."""
        tokenizer = self._engine.tokenizer
        token_ids = self._engine.encode(prompt)
        is_chat = isinstance(prompt, Mapping) or (
            isinstance(prompt, str) and bool(tokenizer and tokenizer.chat_template)
        )
        tags = tokenizer.output_parser.think_tags or () if tokenizer is not None and is_chat else ()
        seed = derive_seed(0, "index", index)
        for number in range(params.n):
            asked = params.for_sample(number)
            request_id = self._engine.add(token_ids, asked, seed=seed, sample_index=number, tags=tags)
            self._indices[request_id] = index
            if params.echo and tokenizer is not None:
                self._echoes[request_id] = tokenizer.decode(token_ids, skip_special_tokens=params.skip_special_tokens)

    def events(self) -> Iterator[tuple[int, TokenEvent]]:
        """(index of the prompt, event) until all have ended."""
        left = set(self._indices)
        while left:
            for event in self._engine.step():
                if event.request_id not in left:
                    continue
                echo = self._echoes.pop(event.request_id, "")
                if event.finish_reason is not None:
                    left.remove(event.request_id)
                yield self._indices[event.request_id], event._replace(said=echo + event.said) if echo else event

    def cancel(self) -> None:
        """Drops what is unfinished."""
        for request_id in self._indices:
            self._engine.cancel(request_id)


def stream(
    engine: Steppable, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
) -> Iterator[tuple[int, TokenEvent]]:
    """See `Engine.stream`."""
    each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
    together = Generation(engine)
    try:
        for index, (prompt, asked) in enumerate(zip(prompts, each, strict=True)):
            try:
                together.add(index, prompt, asked)
            except RequestError as error:
                yield index, TokenEvent(None, None, finish_reason="error", error=error)
        yield from together.events()
    finally:
        together.cancel()
