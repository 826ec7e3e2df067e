"""`Engine.generate` and `Engine.stream`: several prompts on one engine, from the first to the last token."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from typing import Protocol

from cbatch.engine.base.errors import RequestError
from cbatch.engine.base.outputs import Completion, TokenEvent
from cbatch.engine.base.params import SamplingParams, derive_seed
from cbatch.engine.text.detokenizer import OutputDetokenizer
from cbatch.engine.text.tokenizer import ChatTokenizer, Prompt


class Steppable(Protocol):
    """What this module uses of an engine (see `engine.Engine`)."""

    tokenizer: ChatTokenizer | None

    def encode(self, prompt: Prompt) -> list[int]: ...

    def add(
        self, prompt: Prompt, params: SamplingParams, *, seed: int, sample_index: int, tags: Sequence[str]
    ) -> int: ...

    def detokenizer(
        self, prompt_ids: Sequence[int], params: SamplingParams, tags: Sequence[str]
    ) -> OutputDetokenizer: ...

    def step(self) -> list[TokenEvent]: ...

    def cancel(self, request_id: int) -> None: ...


@dataclass(slots=True)
class Output:
    """What is needed to read one output of a prompt.

    index: of the prompt
    echo:  text that is put before the output
    """

    index: int
    detokenizer: OutputDetokenizer
    echo: str = ""

    def with_text(self, event: TokenEvent) -> TokenEvent:
        """The output's next event with its text. Raises RequestError if that cannot be made."""
        text = self.echo + self.detokenizer.update(event)
        self.echo = ""
        return event._replace(text=text)


class Generation:
    """Completes several prompts at once on an engine, and yields the events of their outputs."""

    def __init__(self, engine: Steppable) -> None:
        self._engine = engine
        self._outputs: dict[int, Output] = {}
        """Unfinished outputs, by the id of the request."""

    def run(
        self, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
    ) -> Generator[tuple[Output, TokenEvent]]:
        """The events of all outputs, as the engine returns them. Leaving the iteration cancels unfinished requests."""
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else list(params)
        try:
            for index, (prompt, asked) in enumerate(zip(prompts, each, strict=True)):
                try:
                    self._add(index, prompt, asked)
                except RequestError as error:
                    yield Output(index, OutputDetokenizer()), TokenEvent(None, None, finish_reason="error", error=error)
            while self._outputs:
                for event in self._engine.step():
                    request_id = event.request_id
                    if request_id is None or request_id not in self._outputs:
                        continue
                    output = self._outputs[request_id]
                    if event.finish_reason is not None:
                        del self._outputs[request_id]
                    yield output, event
        finally:
            for request_id in self._outputs:
                self._engine.cancel(request_id)

    def fail(self, event: TokenEvent, error: RequestError) -> TokenEvent:
        """Ends the output of this event with an error."""
        if event.request_id is not None and self._outputs.pop(event.request_id, None) is not None:
            self._engine.cancel(event.request_id)
        return TokenEvent(event.request_id, None, finish_reason="error", error=error, sample_index=event.sample_index)

    def _add(self, index: int, prompt: Prompt, params: SamplingParams) -> None:
        """Queues as many requests as the parameters ask for. Raises RequestError."""
        tokenizer = self._engine.tokenizer
        token_ids = self._engine.encode(prompt)
        is_chat = isinstance(prompt, Mapping) or (
            isinstance(prompt, str) and bool(tokenizer and tokenizer.chat_template)
        )
        tags = tokenizer.output_parser.think_tags or () if tokenizer is not None and is_chat else ()
        seed, echo = derive_seed(0, "index", index), ""
        if params.echo and tokenizer is not None:
            echo = tokenizer.decode(token_ids, skip_special_tokens=params.skip_special_tokens)
        for number in range(params.n):
            asked = params.for_sample(number)
            request_id = self._engine.add(token_ids, asked, seed=seed, sample_index=number, tags=tags)
            self._outputs[request_id] = Output(index, self._engine.detokenizer(token_ids, asked, tags), echo)


def stream(
    engine: Steppable, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
) -> Iterator[tuple[int, TokenEvent]]:
    """See `Engine.stream`."""
    generation = Generation(engine)
    with closing(generation.run(prompts, params)) as run:
        for output, event in run:
            try:
                with_text = output.with_text(event)
            except RequestError as error:
                with_text = generation.fail(event, error)
            yield output.index, with_text


def generate(
    engine: Steppable, prompts: Sequence[Prompt], params: SamplingParams | Sequence[SamplingParams]
) -> list[Completion]:
    """See `Engine.generate`. Texts are made at the end, where no step waits for them."""
    completions = [Completion() for _ in prompts]
    finished: list[tuple[Output, Completion]] = []
    for output, event in Generation(engine).run(prompts, params):
        completion = completions[output.index]
        completion.take(event)
        if event.finish_reason is not None:
            finished.append((output, completion.choices[event.sample_index]))
    for output, choice in finished:
        try:
            choice.text = output.echo + output.detokenizer.text_of(choice)
        except RequestError as error:
            choice.finish_reason, choice.error = "error", error
    return completions
