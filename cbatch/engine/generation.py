"""`generate` and `stream` of an engine: several prompts, from the first to the last token."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Generator, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass

from cbatch.engine.base.errors import RequestError
from cbatch.engine.base.outputs import Completion, TokenEvent
from cbatch.engine.base.params import SamplingParams, derive_seed
from cbatch.engine.models.loader import LoadedModel
from cbatch.engine.text.detokenizer import OutputDetokenizer
from cbatch.engine.text.tokenizer import ChatTokenizer, Prompt

PromptParams = SamplingParams | Sequence[SamplingParams] | None


@dataclass(slots=True)
class _Output:
    """What is needed to read an output of the prompt at `index`. `echo` is text that is put before it."""

    index: int
    detokenizer: OutputDetokenizer
    echo: str = ""


class GenerationMixin(ABC):
    """Completes several prompts at once by the other methods of an engine (see `engine.Engine`)."""

    tokenizer: ChatTokenizer | None
    loaded: LoadedModel

    @abstractmethod
    def encode(self, prompt: Prompt) -> list[int]: ...

    @abstractmethod
    def add(
        self, prompt: Prompt, params: SamplingParams, *, seed: int, sample_index: int, tags: Sequence[str]
    ) -> int: ...

    @abstractmethod
    def detokenizer(
        self, prompt_ids: Sequence[int], params: SamplingParams, tags: Sequence[str]
    ) -> OutputDetokenizer: ...

    @abstractmethod
    def step(self) -> list[TokenEvent]: ...

    @abstractmethod
    def cancel(self, request_id: int) -> None: ...

    def generate(self, prompts: Sequence[Prompt], params: PromptParams = None) -> list[Completion]:
        """Completes all prompts side by side; returns one `Completion` for each, in order.

        params: one for all prompts, one for each, or None for the model's own defaults

        A prompt that cannot be served has `error` set. If several outputs are asked for (`n`), they are `choices`.
        """
        completions = [Completion() for _ in prompts]
        finished: list[tuple[_Output, Completion]] = []
        for output, event in self._run({}, prompts, params):
            completion = completions[output.index]
            completion.take(event)
            if event.finish_reason is not None:
                finished.append((output, completion.choices[event.sample_index]))
        for output, choice in finished:  # texts are made at the end, where no step waits for them
            try:
                choice.text = output.echo + output.detokenizer.text_of(choice)
            except RequestError as error:
                choice.finish_reason, choice.error = "error", error
        return completions

    def stream(self, prompts: Sequence[Prompt], params: PromptParams = None) -> Iterator[tuple[int, TokenEvent]]:
        """Completes all prompts side by side; yields (index of the prompt, event) as tokens come.

        Several outputs of a prompt differ by `event.sample_index`. A prompt without a seed gets one from its index.
        Leaving the iteration early cancels what is unfinished.
        """
        outputs: dict[int, _Output] = {}
        with closing(self._run(outputs, prompts, params)) as run:
            for output, event in run:
                try:
                    event = event._replace(text=output.echo + output.detokenizer.update(event))
                except RequestError as error:
                    request_id, sample_index = event.request_id, event.sample_index
                    event = TokenEvent(request_id, None, finish_reason="error", error=error, sample_index=sample_index)
                    if request_id is not None and outputs.pop(request_id, None) is not None:
                        self.cancel(request_id)
                output.echo = ""
                yield output.index, event

    def _run(
        self, outputs: dict[int, _Output], prompts: Sequence[Prompt], params: PromptParams
    ) -> Generator[tuple[_Output, TokenEvent]]:
        """The events of all outputs, as the engine returns them. Leaving the iteration cancels unfinished requests.

        outputs: the unfinished ones, by the id of the request
        """
        params = params or self.loaded.defaults
        each = [params] * len(prompts) if isinstance(params, SamplingParams) else params
        try:
            for index, (prompt, asked) in enumerate(zip(prompts, each, strict=True)):
                try:
                    self._add_outputs(outputs, index, prompt, asked)
                except RequestError as error:
                    refused = TokenEvent(None, None, finish_reason="error", error=error)
                    yield _Output(index, OutputDetokenizer()), refused
            while outputs:
                for event in self.step():
                    request_id = event.request_id
                    if request_id is None or request_id not in outputs:
                        continue
                    output = outputs[request_id]
                    if event.finish_reason is not None:
                        del outputs[request_id]
                    yield output, event
        finally:
            for request_id in outputs:
                self.cancel(request_id)

    def _add_outputs(self, outputs: dict[int, _Output], index: int, prompt: Prompt, params: SamplingParams) -> None:
        """Queues as many requests as the parameters ask for. Raises RequestError."""
        tokenizer = self.tokenizer
        token_ids = self.encode(prompt)
        has_template = tokenizer is not None and bool(tokenizer.chat_template)
        is_chat = isinstance(prompt, Mapping) or (isinstance(prompt, str) and has_template)
        tags = tokenizer.output_parser.think_tags or () if tokenizer is not None and is_chat else ()
        seed, echo = derive_seed(0, "index", index), ""
        for number in range(params.n):
            asked = params.for_sample(number)
            request_id = self.add(token_ids, asked, seed=seed, sample_index=number, tags=tags)
            if number == 0 and params.echo and tokenizer is not None:  # after `add`, which refuses unknown ids
                echo = tokenizer.decode(token_ids, skip_special_tokens=params.skip_special_tokens)
            outputs[request_id] = _Output(index, self.detokenizer(token_ids, asked, tags), echo)
