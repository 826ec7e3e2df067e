"""A request, on its way from a row, a call or a chat through an engine, and what holds for all of them by default."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from cbatch.base.chat_template_options import DEFAULT_TEMPLATE, TemplateOptions
from cbatch.base.errors import RequestError, invalid_row
from cbatch.base.outputs import KnownOutput, TokenEvent
from cbatch.base.params import DEFAULT_PARAMS, SamplingParams, derive_seed

EventCallback = Callable[[TokenEvent], None]
"""Receives the events of one request. It is called on the engine's thread, so it must be quick (put into a queue)."""


@dataclass(frozen=True, slots=True)
class ApiCall:
    """The kind of an OpenAI Batch request: a chat or a text completion, of which model.

    repeated: of one to the Responses API, the fields that its answer repeats, as JSON
    top_n:    of one that ranks documents, how many of them its answer has; 0 for all, None of others
    """

    is_chat: bool
    model: str | None
    repeated: str = ""
    top_n: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class EmbedOptions:
    """Texts that are embedded instead of continued, in one request.

    inputs:      texts, or token ids of each
    is_list:     whether they were given as a list, so that their embeddings are one
    dimensions:  how many numbers of each embedding are kept, the first ones; None for all
    prompt_name: of the instruction in front of each text, among those of the model's files; None for its default
    is_base64:   the row has the bytes of float32 numbers as base64, as OpenAI's API gives them if asked to
    """

    inputs: Sequence[str | Sequence[int]]
    is_list: bool = False
    dimensions: int | None = None
    prompt_name: str | None = None
    is_base64: bool = False


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """That the model must call a function: the one of this name, or, if it is None, any of the tools."""

    name: str | None = None


class ScoredTail(NamedTuple):
    """The end of a continuation that is scored, or of several that differ in their last token.

    token_ids:   behind the request's `prompt_ids`, without the last one
    scored_from: number of the first token that is scored, counted from the beginning of the prompt
    last:        tokens that may follow, each of which is scored; nothing is computed for them
    members:     number of the continuation that ends with each
    """

    token_ids: Sequence[int]
    scored_from: int
    last: Sequence[int]
    members: Sequence[int]


class ImageTexts(NamedTuple):
    """The texts that stand for images and videos in a prompt.

    markers: what the chat template writes for each of them
    texts:   come in the places of these
    before:  stands before the prompt
    has_bos: whether the prompt gets the tokens that the tokenizer adds to texts, unless BOS stands there
    """

    markers: Sequence[str]
    texts: Sequence[str]
    before: str = ""
    has_bos: bool = False


class PlacedImage(NamedTuple):
    """An image in a prompt.

    picture: where it comes from (`cbatch.media.Picture`)
    digest:  of its contents
    places:  [P] int64, ascending: the numbers of the prompt's tokens that the rows of its features replace
    """

    picture: Any
    digest: str
    places: Any


@dataclass(eq=False, slots=True, kw_only=True)
class Request:
    """One request. It is filled as it goes, and each stage reads what the stages before it have set.

    Asked for by a row or a program. Exactly one of the first three is set, unless there is an `error`:
    text:       plain text to continue; in a row it may become a message of the user
    messages:   a conversation, for the chat template. Content is text, or a list of `{"type": "text", "text": ...}` and
                `{"type": "image"}` or `{"type": "video"}`
    prompt_ids: token ids to continue. Those of other prompts are made by `InputProcessor.encode`
    raw:        take `text` as it is, even if the model has a chat template
    system:     system message, if the conversation has none
    tools:      functions that the model may call, in OpenAI's form
    choice:     what it must call; None if it need not call any
    max_calls:  most tool calls of an output that count; None for all
    continuations: texts or token ids whose log-probabilities behind the prompt are asked for, instead of an answer.
                None stands for the prompt itself
    answer:     beginning of the model's answer, which it is to continue
    embed:      what is embedded, if nothing is to be generated
    given:      sampling parameters that the row sets, by name
    given_template: options of the chat template that the row sets
    given_pictures: what the row says of each picture, and where it stands, for messages; of a video also its frames per
                second. Empty once `pictures` is set
    priority:   lower priorities run first
    tool_rounds: how often what the model calls is run; 0 gives the calls as the result
    tries:      how many tries earlier runs have given it
    validation: how its result is validated, for its key (`Validation.identity`)

    Where it comes from, for its result:
    index:  0-based number of the line in the input, or of the prompt in a call
    where:  where the row stands, for messages: “line 3”; empty if that goes without saying
    id:     the row's own name
    extra:  other columns, which are copied to the result
    call:   set if the row is an OpenAI Batch request, so that its result has that form too
    error:  why the row cannot be read
    first:  the request of the same row that this one follows on, after a round of tools or a try

    With all defaults applied, by `InputProcessor.request`:
    params:   sampling parameters
    template: options of the chat template
    seed:     seed of its randomness; that of the parameters counts first
    key:      hash of all that decides its result
    adapter:  fingerprint of its LoRA adapter; empty if it has none
    columns:  columns of its row of output that are asked for (see `requests/columns.py`)
    labels:   those of the model's classification head, if it scores the continuations
    image_texts: what stands for its pictures in the prompt, if there are any
    pictures: those of all messages in their order (`Picture`)

    Encoded, by `InputProcessor.encode`:
    dropped_tokens: of the prompt, as `truncate_prompt` says
    grammar:  compiled constraint of the output (`CompiledGrammar`)
    is_reply: whether the output is a reply in a conversation, which comes apart into reasoning, text and tool calls
    tags:     special tokens that stay in its text, because they tell these apart
    opens_thinking: whether the template has opened the think tag of the answer, in front of `prefix`
    is_thinking: whether the prompt leaves the model inside its reasoning
    prefix:   the beginning of the answer, which the prompt ends with
    known:    what each output has already, which it goes on with; empty if nothing is known
    images:   those of its prompt, in order
    positions: [3, P] int64, of its prompt's tokens in time, rows and columns, if its images have these
    content_ids: its token ids, with numbers of their own for the rows of each image; empty if there are no images
    two_way_spans: parts of its prompt, from a token up to another, whose tokens see each other: a step computes all
              that is left of one, or nothing
    tails:    of the continuations, which begin alike with `prompt_ids`, or each text that is embedded or classified;
              empty if an answer is asked for

    In an engine, by `SteppingEngine.add_request` and `EngineThread`:
    request_id:      its number there; None until it is accepted
    max_new_tokens:  most tokens of each output
    stop_ids:        tokens that end an output
    bad_words:       sequences of tokens that may not be generated
    adapter_number:  of its LoRA adapter, from 1 on; 0 for none
    position_offset: what is added to its position ids: a model may encode long sequences in another way
    images_s:        seconds in which rows of its images were computed
    started_at:      when the first of its outputs got a slot, in seconds of `time.monotonic`
    on_event:        takes its events; None before it is submitted and after its last event
    unfinished:      numbers of the outputs whose last event has not come; empty once it is cancelled
    """

    text: str | None = None
    messages: Sequence[Mapping[str, Any]] | None = None
    prompt_ids: Sequence[int] = ()
    raw: bool = False
    system: str | None = None
    tools: Sequence[Mapping[str, Any]] = ()
    choice: ToolChoice | None = None
    max_calls: int | None = None
    continuations: Sequence[str | Sequence[int] | None] = ()
    answer: str = ""
    embed: EmbedOptions | None = None
    given: dict[str, Any] = field(default_factory=dict)
    given_template: dict[str, Any] = field(default_factory=dict)
    given_pictures: Sequence[tuple[Any, ...]] = ()
    priority: int = 0
    tool_rounds: int = 0
    tries: int = 0
    validation: tuple[object, ...] = ()

    index: int = 0
    where: str = ""
    id: str | int | float | None = None
    extra: dict[str, Any] = field(default_factory=dict)
    call: ApiCall | None = None
    error: RequestError | None = None
    first: Request | None = None

    params: SamplingParams = DEFAULT_PARAMS
    template: TemplateOptions = DEFAULT_TEMPLATE
    seed: int = 0
    key: str = ""
    adapter: str = ""
    columns: Sequence[str] = ()
    labels: Sequence[str] = ()
    image_texts: ImageTexts | None = None
    pictures: Sequence[Any] = ()

    dropped_tokens: int = 0
    grammar: Any = None
    is_reply: bool = False
    tags: tuple[str, ...] = ()
    opens_thinking: bool = False
    is_thinking: bool = False
    prefix: str = ""
    known: Sequence[KnownOutput] = ()
    images: Sequence[PlacedImage] = ()
    positions: Any = None
    content_ids: Sequence[int] = ()
    two_way_spans: Sequence[tuple[int, int]] = ()
    tails: Sequence[ScoredTail] = ()

    request_id: int | None = None
    max_new_tokens: int = 0
    stop_ids: frozenset[int] = frozenset()
    bad_words: Sequence[Sequence[int]] = ()
    adapter_number: int = 0
    position_offset: int = 0
    images_s: float = 0.0
    started_at: float | None = None
    on_event: EventCallback | None = None
    unfinished: set[int] = field(default_factory=set)

    @property
    def prompt(self) -> str | Sequence[int] | Mapping[str, Any]:
        """The question, in one of the forms of a prompt."""
        if self.messages is not None:
            return {"messages": self.messages} | ({"tools": self.tools} if self.tools else {})
        if self.embed is not None:
            return {"input": list(self.embed.inputs) if self.embed.is_list else self.embed.inputs[0]}
        return self.prompt_ids if self.text is None else self.text

    @property
    def is_pooled(self) -> bool:
        """Whether its result are hidden states, as embeddings or behind a classification head."""
        return self.embed is not None or bool(self.labels)

    @property
    def noise_seed(self) -> int:
        """The seed that counts."""
        return self.seed if self.params.seed is None else self.params.seed

    @property
    def num_outputs(self) -> int:
        """How many sequences an engine computes for it."""
        return len(self.tails) or self.params.n

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens that are given, each that several outputs share once."""
        return len(self.prompt_ids) + sum(len(tail.token_ids) + len(tail.last) for tail in self.tails)

    def derived_seed(self, run_seed: int) -> int:
        """The seed that the row gets in a run with this one, unless it has its own."""
        kind, name = ("id", self.id) if self.id is not None else ("index", self.index)
        return derive_seed(run_seed, kind, name)

    def ends(self, eos_ids: frozenset[int]) -> frozenset[int]:
        """Tokens that end an output, of a model with these end tokens."""
        return frozenset(self.params.stop_token_ids) | (frozenset() if self.params.ignore_eos else eos_ids)

    def following(self, **changes: Any) -> Request:
        """Another request for the same row, with some fields replaced, to be encoded."""
        if "messages" in changes:
            changes = {"prompt_ids": (), "dropped_tokens": 0, **changes}
        anew: dict[str, Any] = dict.fromkeys(["grammar", "request_id", "started_at", "on_event"])
        return replace(self, first=self.first or self, known=(), unfinished=set(), **anew, **changes)

    def without_source(self) -> Request:
        """The encoded request as an engine needs it, without its source, which may be much larger."""
        return replace(self, text=None, messages=None, continuations=(), given={}, extra={}, first=None)

    def invalid(self, message: str, code: str = "invalid_row") -> RequestError:
        """An error that says where the row stands."""
        return RequestError(code, f"{self.where}: {message}" if self.where else message)

    def located(self, error: RequestError) -> RequestError:
        """The same error, saying where the row stands."""
        return self.invalid(str(error), error.code) if self.where else error


ParamsLike = SamplingParams | Mapping[str, Any]
"""Sampling parameters. Those of a mapping come on top of the model's own defaults; an object replaces these."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestDefaults:
    """Defaults of every request of a run or a call.

    params:   sampling parameters: by name, on top of the model's own defaults, or an object instead of these
    system:   system message of conversations that have none
    seed:     seed from which requests without a seed of their own get theirs
    raw:      take every prompt as plain text to continue
    template: options of the chat template
    columns:  columns of rows of output that are asked for (see `requests/columns.py`)
    media_root: folder below which files of pictures must lie; None: that of the engine, and also whether to fetch any
    allow_remote_media: whether pictures are fetched from web servers
    """

    params: ParamsLike = field(default_factory=dict)
    system: str | None = None
    seed: int = 0
    raw: bool = False
    template: TemplateOptions = field(default_factory=TemplateOptions)
    columns: tuple[str, ...] = ()
    media_root: str | None = None
    allow_remote_media: bool = False

    def __post_init__(self) -> None:
        """Raises RequestError for a seed or a system message of a wrong type."""
        if isinstance(self.seed, bool) or not hasattr(self.seed, "__index__"):
            raise invalid_row(f"seed must be a whole number or None, not {self.seed!r}.")
        if self.media_root is not None:
            object.__setattr__(self, "media_root", os.path.realpath(self.media_root))  # also for replicas elsewhere
        object.__setattr__(self, "seed", operator.index(self.seed))  # numpy has whole numbers of its own
        if not isinstance(self.system, str | None):
            raise invalid_row(f"system must be a text or None, not {type(self.system).__name__}.")
