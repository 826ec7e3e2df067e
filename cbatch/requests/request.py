"""What a caller asks for, and its form with token ids, as the engine takes it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from cbatch.base.outputs import KnownOutput, TokenEvent
from cbatch.base.params import SamplingParams
from cbatch.base.template_options import TemplateOptions
from cbatch.requests.row import InputRow
from cbatch.sample.structured.grammar import CompiledGrammar
from cbatch.text.detokenizer import NUM_CONTEXT_TOKENS, OutputDetokenizer
from cbatch.text.tokenizer import ChatTokenizer, Message, Prompt
from cbatch.text.tool_calls import ToolChoice


@dataclass(slots=True, kw_only=True)
class GenerationRequest:
    """One request, from Python, a row of a file or a chat, with all defaults applied.

    Exactly one of the first three is set. Nobody changes a request that `InputProcessor.request` has returned.

    text:       plain text to continue
    prompt_ids: token ids to continue
    messages:   a conversation, for the chat template
    tools:      functions that the model may call, in OpenAI's form
    choice:     what it must call; None if it need not call any
    max_calls:  most tool calls of an output that count; None for all
    template:   options of the chat template
    answer:     beginning of the model's answer, which it is to continue
    params:     sampling parameters
    seed:       seed of its randomness; that of the parameters counts first
    priority:   lower priorities run first
    source:     the row that it came from
    key:        hash of all that decides its result
    adapter:    fingerprint of its LoRA adapter; empty if it has none
    known_ids:  the prompt's token ids, if they are known already
    with_token_ids: whether the row of output has the output's token ids
    """

    text: str | None = None
    prompt_ids: Sequence[int] | None = None
    messages: Sequence[Message] | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    choice: ToolChoice | None = None
    max_calls: int | None = None
    template: TemplateOptions = field(default_factory=TemplateOptions)
    answer: str = ""
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    priority: int = 0
    source: InputRow = field(default_factory=lambda: InputRow(0))
    key: str = ""
    adapter: str = ""
    known_ids: list[int] | None = None
    with_token_ids: bool = False

    @property
    def prompt(self) -> Prompt:
        """What is asked, in one of the forms of a prompt."""
        if self.messages is not None:
            return {"messages": self.messages} | ({"tools": self.tools} if self.tools else {})
        return self.prompt_ids if self.prompt_ids is not None else self.text or ""


@dataclass(frozen=True, slots=True, kw_only=True)
class EncodedRequest:
    """A request that an engine can run (see `InputProcessor.encode`).

    prompt_ids:  token ids of the prompt
    grammar:     compiled constraint of the output
    tags:        special tokens that stay in the text, because they tell the parts of an answer apart; empty if the
                 output is not an answer in a conversation
    opens_thinking: whether the template has opened the think tag of the answer, in front of `prefix`
    is_thinking: whether the prompt leaves the model inside its reasoning
    max_calls:   most tool calls of an output that count; None for all
    prefix:      the beginning of the answer, which the prompt ends with
    known:       what each output has already, which it goes on with; empty if nothing is known
    asked:       what it was encoded from
    """

    prompt_ids: Sequence[int]
    params: SamplingParams = field(default_factory=SamplingParams)
    seed: int = 0
    priority: int = 0
    grammar: CompiledGrammar | None = None
    tags: tuple[str, ...] = ()
    opens_thinking: bool = False
    is_thinking: bool = False
    tools: Sequence[Mapping[str, Any]] = ()
    max_calls: int | None = None
    prefix: str = ""
    known: Sequence[KnownOutput] = ()
    source: InputRow = field(default_factory=lambda: InputRow(0))
    key: str = ""
    with_token_ids: bool = False
    asked: GenerationRequest = field(default_factory=GenerationRequest)

    @property
    def index(self) -> int:
        """Number of the prompt in its call, or of its line in a file."""
        return self.source.index

    def without_source(self) -> EncodedRequest:
        """What an engine needs of it, without the row that it came from, which may be much larger."""
        return replace(self, source=InputRow(self.index), asked=GenerationRequest())

    def detokenizer(self, tokenizer: ChatTokenizer | None, eos_ids: frozenset[int]) -> OutputDetokenizer:
        """Makes the text of one output of this request from its events.

        eos_ids: the model's own end tokens
        """
        if tokenizer is None or self.params.stop:
            return OutputDetokenizer()
        make = partial(tokenizer.detokenizer, list(self.prompt_ids[-NUM_CONTEXT_TOKENS:]), self.params, self.tags)
        return OutputDetokenizer(make, self.stop_ids(eos_ids))

    def stop_ids(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """Tokens that end an output."""
        return frozenset(self.params.stop_token_ids) | (frozenset() if self.params.ignore_eos else eos_ids)


EventCallback = Callable[[TokenEvent], None]
"""Receives the events of one request. It is called on the engine's thread, so it must be quick (put into a queue)."""


@dataclass(eq=False, slots=True)
class RequestHandle:
    """A request for an engine's thread, which cancels it by its handle.

    request_id: None until the engine has accepted it
    unfinished: numbers of the outputs whose last event has not come; empty once it is cancelled
    """

    request: EncodedRequest
    on_event: EventCallback
    request_id: int | None = None
    unfinished: set[int] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.unfinished = set(range(self.request.params.n))
