"""From a row to a request of the engine."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any

from cbatch.engine.base.errors import RequestError
from cbatch.engine.base.outputs import Completion
from cbatch.engine.base.params import SamplingParams, derive_seed
from cbatch.engine.engine import Engine
from cbatch.engine.requests.request import RequestDefaults
from cbatch.engine.requests.row import InputRow
from cbatch.engine.requests.row_keys import KeyMaker, canonical_params
from cbatch.engine.text.detokenizer import OutputDetokenizer
from cbatch.engine.text.tokenizer import Prompt


@dataclass(slots=True)
class RowRequest:
    """A row on its way through a run: what it asks for, and what has come of it so far.

    prompt:         text to continue, token ids or a conversation, with all options applied
    prompt_ids:     the prompt's token ids, once they are known
    tags:           special tokens that tell the parts of an answer apart
    echo:           text that stands before each output
    grammar:        compiled constraint; held here so that the engine still finds it when the request is admitted
    is_thinking:    the prompt leaves the model inside its reasoning
    error:          why there is no answer; `failed_sample` is the output that it belongs to
    is_lost:        the engine failed before the request was finished, so it gets no row of output
    taken_at, first_token_at, finished_at: times of `time.monotonic`
    position:       number among the rows of the run
    """

    row: InputRow
    params: SamplingParams
    seed: int = 0
    key: str = ""
    prompt: Prompt = ""
    prompt_ids: list[int] | None = None
    prompt_tokens: int = 0
    tags: tuple[str, ...] = ()
    echo: str = ""
    grammar: object = None
    is_thinking: bool = False
    detokenizer: OutputDetokenizer = field(default_factory=OutputDetokenizer)
    completion: Completion = field(default_factory=Completion)
    error: RequestError | None = None
    failed_sample: int = 0
    is_lost: bool = False
    taken_at: float = 0.0
    first_token_at: float | None = None
    finished_at: float = 0.0
    position: int = 0

    def fail(self, error: RequestError, sample_index: int = 0) -> None:
        """Makes the row an error row. If several outputs fail, the error of the first one counts."""
        if self.error is None or sample_index < self.failed_sample:
            self.error, self.failed_sample = self.row.invalid(str(error), error.code), sample_index

    def release_prompt(self, prompt_ids: list[int]) -> None:
        """Forgets the prompt, which the engine has now; keeps its token ids only if their logprobs are wanted."""
        self.prompt, self.prompt_tokens = "", len(prompt_ids)
        self.prompt_ids = prompt_ids if self.params.prompt_logprobs is not None else None


class InputProcessor:
    """Makes requests of rows, for one engine."""

    def __init__(self, engine: Engine, defaults: RequestDefaults, *, token_ids: bool = False) -> None:
        """`token_ids`: whether results show the output's token ids, which is a part of the key."""
        self._engine = engine
        self._defaults = defaults
        self._token_ids = token_ids
        given, tokenizer = defaults.params, engine.tokenizer
        self._params = engine.loaded.defaults.merged(given)
        self._openai_params = self._params
        if given.get("max_tokens") is None:  # that API has no default of its own
            self._openai_params = replace(self._params, max_tokens=None)
        self._has_template = tokenizer is not None and bool(tokenizer.chat_template)
        self._takes_tools = tokenizer is not None and tokenizer.takes_tools
        clock = defaults.template.today.isoformat() if tokenizer is not None and tokenizer.template_has_clock else ""
        self._keys = KeyMaker(engine.fingerprint + clock)

    def build(self, row: InputRow, source: bytes) -> RowRequest:
        """Applies the defaults to a row. Never raises: whatever is wrong with the row is the request's `error`.

        source: the bytes that the row was read from, which make the key of a row that is refused
        """
        error = row.error
        if error is None:
            try:
                return self._build_from_row(row)
            except RequestError as refused:
                error = row.invalid(str(refused), refused.code)
            except Exception as unforeseen:  # one row that breaks something harms no other
                row = InputRow(row.index)
                error = row.invalid(f"the row cannot be read: {unforeseen!r}", "internal_error")
        return RowRequest(row, self._params, key=self._keys.for_invalid_row(source), error=error)

    def encode(self, request: RowRequest) -> list[int] | None:
        """Token ids of the prompt, or None if the request has an `error`."""
        if request.error is None and request.prompt_ids is None:
            tokenizer = self._engine.tokenizer
            try:
                request.grammar = self._engine.compile(request.params)
                if request.params.bad_words and tokenizer is not None:
                    tokenizer.bad_word_ids(request.params.bad_words)  # fills a cache here, not on the engine's thread
                request.prompt_ids = self._engine.encode(request.prompt, raw=True, template=self._defaults.template)
                self._set_output_format(request)
            except RequestError as error:
                request.fail(error)
            except Exception as unforeseen:  # one prompt that breaks something harms no other
                request.fail(RequestError("internal_error", f"the prompt cannot be encoded: {unforeseen!r}"))
        return request.prompt_ids

    def _build_from_row(self, row: InputRow) -> RowRequest:
        params, sampling = self._sampling(row)
        kind, name = ("id", row.id) if row.id is not None else ("index", row.index)
        seed = derive_seed(self._defaults.seed, kind, name) if params.seed is None else params.seed
        request = RowRequest(row, params, seed, prompt=self._prompt(row))
        limit = self._limit_of_cache(request)
        request.key = self._keys.for_row(row, request.prompt, sampling, seed, self._token_ids, limit)
        return request

    def _sampling(self, row: InputRow) -> tuple[SamplingParams, bytes]:
        """A row's effective parameters, and their form in its key. Most rows of a run share both."""
        base = self._openai_params if row.call else self._params
        given = tuple((name, type(value), value) for name, value in row.params.items())
        try:
            params, canonical = _merge_params(base, given)
        except TypeError:  # a list, such as stop strings, has no hash
            params, canonical = _merge_params.__wrapped__(base, given)
        is_text_call = row.call is not None and not row.call.is_chat
        if is_text_call and params.echo and params.logprobs is not None and params.prompt_logprobs is None:
            params = replace(params, prompt_logprobs=params.logprobs)  # this API scores what it echoes
        return params, canonical

    def _prompt(self, row: InputRow) -> Prompt:
        """The row's prompt with the defaults applied. Raises RequestError."""
        if row.prompt_token_ids is not None:
            return row.prompt_token_ids
        messages = row.messages
        if row.tools and not self._has_template:
            raise RequestError("invalid_row", "tools need a chat template, and this model has none")
        if row.tools and self._defaults.raw:
            raise RequestError("invalid_row", "tools need the chat template, and --raw skips it")
        if row.tools and not self._takes_tools:
            raise RequestError("invalid_row", "this model's chat template takes no tools")
        if row.prompt is not None:
            if row.raw or self._defaults.raw or not self._has_template:
                return row.prompt
            messages = [{"role": "user", "content": row.prompt}]
        assert messages is not None
        system = self._defaults.system
        if system is not None and not any(message["role"] == "system" for message in messages):
            messages = [{"role": "system", "content": system}, *messages]
        return {"messages": messages} | ({"tools": row.tools} if row.tools else {})

    def _limit_of_cache(self, request: RowRequest) -> int | None:
        """The number of tokens after which the cache cuts off the output earlier than the context; usually None."""
        limits = self._engine.limits.sequence
        if not limits.cache_is_small or (prompt_ids := self.encode(request)) is None:
            return None
        return limits.limit_of_cache(len(prompt_ids), request.params.max_tokens)

    def _set_output_format(self, request: RowRequest) -> None:
        """Notes how to read the output: that of a conversation may have reasoning and tool calls."""
        tokenizer = self._engine.tokenizer
        if tokenizer is None or not request.prompt_ids:
            return
        if request.params.echo:
            request.echo = tokenizer.decode(request.prompt_ids, skip_special_tokens=request.params.skip_special_tokens)
        if isinstance(request.prompt, Mapping):
            parser = tokenizer.output_parser
            request.tags = parser.special_tags if request.row.tools else parser.think_tags or ()
            request.is_thinking = tokenizer.opens_thinking(request.prompt_ids)


@lru_cache(maxsize=256)
def _merge_params(base: SamplingParams, given: tuple[tuple[str, type, Any], ...]) -> tuple[SamplingParams, bytes]:
    """`given` has the types of the values, because true and 1.0 equal 1 but are not whole numbers."""
    params = base.merged({name: value for name, _, value in given})
    return params, canonical_params(params)
