"""From a row or a prompt to a request that the engine can run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache
from typing import Any

from cbatch.base.errors import RequestError, as_error
from cbatch.base.params import SamplingParams, derive_seed
from cbatch.base.request_defaults import RequestDefaults
from cbatch.base.template_options import TemplateOptions
from cbatch.extras import require_package
from cbatch.requests.completion import Completion
from cbatch.requests.param_names import own_params
from cbatch.requests.request import EncodedRequest, GenerationRequest
from cbatch.requests.row import InputRow
from cbatch.requests.row_keys import KeyMaker, canonical_params
from cbatch.sample.structured.grammar import CompiledGrammar
from cbatch.schedule.limits import SequenceLimits
from cbatch.text.tokenizer import ChatTokenizer, Message
from cbatch.text.tool_calls import ToolChoice


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """What the requests for a model depend on.

    tokenizer:      None if the model has none; it takes token ids only
    default_params: the model's own sampling parameters
    limits:         how long sequences can get
    fingerprint:    hash of the model, for keys
    adapters:       fingerprints of its LoRA adapters by name
    compile:        compiles the constraint of a request (see `SteppingEngine.compile`)
    """

    tokenizer: ChatTokenizer | None
    default_params: SamplingParams
    limits: SequenceLimits
    fingerprint: str
    compile: Callable[[SamplingParams, Sequence[Mapping[str, Any]], ToolChoice | None], CompiledGrammar | None]
    adapters: Mapping[str, str] = field(default_factory=dict)


class InputProcessor:
    """Applies defaults to rows, and turns them into token ids. May be used by several threads at once."""

    def __init__(self, model: ModelInfo, defaults: RequestDefaults) -> None:
        """Raises RequestError if the defaults are wrong, and ConfigError if they need what is not installed."""
        self._model, self._defaults, self._tokenizer = model, defaults, model.tokenizer
        self._has_template = model.tokenizer is not None and bool(model.tokenizer.chat_template)
        params = defaults.params
        given, template = ({}, {}) if isinstance(params, SamplingParams) else own_params(params)
        self._params = params if isinstance(params, SamplingParams) else model.default_params.merged(given)
        if self._params.constraint is not None:  # now, instead of an error for each request
            require_package("llguidance")
        self._sets_max_tokens = isinstance(params, SamplingParams) or "max_tokens" in given
        self._template = _with_fields(defaults.template, template)

    @property
    def limits(self) -> SequenceLimits:
        """How long sequences of the model can get."""
        return self._model.limits

    @cached_property
    def _openai_params(self) -> SamplingParams:
        if self._sets_max_tokens:
            return self._params
        return replace(self._params, max_tokens=None)  # that API has no default of its own

    @cached_property
    def _keys(self) -> KeyMaker:
        has_clock = self._tokenizer is not None and self._tokenizer.template_has_clock
        return KeyMaker(self._model.fingerprint + (self._defaults.template.today.isoformat() if has_clock else ""))

    def request(self, row: InputRow, params: SamplingParams | None = None) -> GenerationRequest:
        """A row with the defaults applied.

        params: complete parameters, instead of the model's own and the defaults; those of the row come on top

        Raises RequestError, which says where the row stands, for a row that is invalid or does not fit the model.
        """
        if row.error is not None:
            raise row.error
        try:
            return self._request(row, params)
        except RequestError as error:
            raise row.located(error) from error
        except BaseException as raised:  # one row that breaks something harms no other
            unforeseen = as_error(raised)
            raise row.invalid(f"the row cannot be read: {unforeseen!r}", "internal_error") from unforeseen

    def encode(self, request: GenerationRequest) -> EncodedRequest:
        """A request as token ids, with its constraint compiled. Raises RequestError as `request` does."""
        try:
            return self._encode(request)
        except RequestError as error:
            raise request.source.located(error) from error
        except BaseException as raised:  # one prompt that breaks something harms no other
            unforeseen = as_error(raised)
            raise request.source.invalid(
                f"the prompt cannot be encoded: {unforeseen!r}", "internal_error"
            ) from unforeseen

    def refused(self, row: InputRow, error: RequestError, data: bytes) -> Completion:
        """The result of a row for which `request` raises.

        data: the bytes that the row was read from, which make its key
        """
        return Completion(row, key=self._keys.for_invalid_row(data), error=error)

    def process(
        self, row: InputRow, data: Callable[[], bytes], params: SamplingParams | None = None
    ) -> EncodedRequest | Completion:
        """A row ready for the engine; or, if anything is wrong with it, its result. Takes what `request` takes.

        data: gives the bytes that the row was read from
        """
        try:
            request = self.request(row, params)
        except RequestError as error:
            return self.refused(row, error, data())
        try:
            return self.encode(request)
        except RequestError as error:
            return Completion(row, key=request.key, error=error)

    def _request(self, row: InputRow, complete: SamplingParams | None) -> GenerationRequest:
        defaults = self._defaults
        params, sampling = self._sampling(row, complete)
        params = self._with_adapter(row, params)
        kind, name = ("id", row.id) if row.id is not None else ("index", row.index)
        seed = derive_seed(defaults.seed, kind, name) if params.seed is None else params.seed
        self._check_tools(row)
        template = _with_fields(self._template, row.template) if row.template else self._template
        request = GenerationRequest(
            text=row.prompt,
            prompt_ids=row.prompt_token_ids,
            messages=row.messages,
            tools=row.tools or (),
            choice=row.choice,
            max_calls=row.max_calls,
            template=template,
            params=params,
            seed=seed,
            priority=row.priority,
            source=row,
            with_token_ids=defaults.with_token_ids,
            adapter=self._model.adapters[params.lora] if params.lora else "",
        )
        if row.prompt is not None and self._has_template and not (row.raw or defaults.raw):
            request.text, request.messages = None, [{"role": "user", "content": row.prompt}]
        self._add_system(request, row)
        limit, limits = None, self._model.limits
        if limits.cache_is_small:  # then the cache may cut off the output earlier than the context
            with suppress(RequestError):  # `encode` will say it
                request.known_ids = self._prompt_ids(request)
                limit = limits.limit_of_cache(len(request.known_ids or ()), params.max_tokens)
        request.key = self._keys.for_row(
            row, request.prompt, sampling, seed, defaults.with_token_ids, limit, asked=_asked(request)
        )
        return request

    def _add_system(self, request: GenerationRequest, row: InputRow) -> None:
        """Adds a system message, if the row or the defaults give one and there is none."""
        messages = request.messages
        if messages is None:
            if row.system or row.template:
                name = "system" if row.system else next(iter(row.template))
                raise RequestError("invalid_row", f"{name} needs the chat template, {self._why_no_template()}")
        elif _has_system(messages):
            if row.system:
                raise RequestError("invalid_row", "the row has both system and a message with that role")
        elif (system := row.system or self._defaults.system) is not None:
            request.messages = [{"role": "system", "content": system}, *messages]

    def _sampling(self, row: InputRow, complete: SamplingParams | None) -> tuple[SamplingParams, bytes]:
        """A row's effective parameters, and their form in its key. Most rows of a run share both."""
        base = complete or (self._openai_params if row.call else self._params)
        given = tuple((name, type(value), value) for name, value in row.params.items())
        try:
            params, canonical = _merge_params(base, given)
        except TypeError:  # a list, such as stop strings, has no hash
            params, canonical = _merge_params.__wrapped__(base, given)
        is_text_call = row.call is not None and not row.call.is_chat
        if is_text_call and params.echo and params.logprobs is not None and params.prompt_logprobs is None:
            params = replace(params, prompt_logprobs=params.logprobs)  # this API scores what it echoes
        return params, canonical

    def _with_adapter(self, row: InputRow, params: SamplingParams) -> SamplingParams:
        """The parameters with the adapter that a row asks for. Raises RequestError if there is none of that name.

        The body of an OpenAI request may name it as its model, as for servers of vLLM.
        """
        adapters, model = self._model.adapters, row.call.model if row.call is not None else None
        if model is not None and model in adapters and "lora" not in row.params:
            params = replace(params, lora=model)
        check_adapter(params.lora, adapters)
        return params

    def _check_tools(self, row: InputRow) -> None:
        if not row.tools:
            return
        if not self._has_template or self._defaults.raw:
            raise RequestError("invalid_row", f"tools need the chat template, {self._why_no_template()}")
        if self._tokenizer is None or not self._tokenizer.takes_tools:
            raise RequestError("invalid_row", "this model's chat template takes no tools")

    def _why_no_template(self) -> str:
        if not self._has_template:
            return "and this model has none"
        return "and --raw skips it" if self._defaults.raw else "which this prompt does not go through"

    def _prompt_ids(self, request: GenerationRequest) -> list[int]:
        if request.known_ids is not None:
            return request.known_ids
        if request.prompt_ids is not None:
            return list(request.prompt_ids)
        if self._tokenizer is None:
            raise RequestError("invalid_row", "This model has no tokenizer; give prompt_token_ids.")
        context = self._model.limits.context
        if request.messages is None:
            return self._tokenizer.encode(request.text or "", context=context)
        return self._tokenizer.encode_chat(
            request.messages, tools=request.tools, template=request.template, answer=request.answer, context=context
        )

    def _encode(self, request: GenerationRequest) -> EncodedRequest:
        tokenizer, params = self._tokenizer, request.params
        prompt_ids = self._prompt_ids(request)
        self._model.limits.max_new_tokens(len(prompt_ids), at_least=0)  # else many too long ones would wait for it
        grammar = self._model.compile(params, request.tools, request.choice)
        if params.bad_words and tokenizer is not None:
            tokenizer.bad_word_ids(params.bad_words)  # fills a cache here, not on the engine's thread
        tags: tuple[str, ...] = ()
        opens_thinking = is_thinking = False
        prefix = request.answer
        if tokenizer is not None and request.messages is not None and prompt_ids:
            parser = tokenizer.output_parser
            tags = parser.special_tags if request.tools else parser.think_tags or ()
            if request.template.continue_final_message:
                prefix = str(request.messages[-1]["content"])
            opens_thinking = tokenizer.opens_thinking(prompt_ids, prefix)
            is_thinking = tokenizer.is_thinking_after(prefix, opened=opens_thinking)
        return EncodedRequest(
            prompt_ids=prompt_ids,
            params=params,
            seed=request.seed,
            priority=request.priority,
            grammar=grammar,
            tags=tags,
            opens_thinking=opens_thinking,
            is_thinking=is_thinking,
            tools=request.tools,
            prefix=prefix,
            max_calls=request.max_calls,
            source=request.source,
            key=request.key,
            with_token_ids=request.with_token_ids,
            asked=request,
        )


def _with_fields(options: TemplateOptions, fields: Mapping[str, Any]) -> TemplateOptions:
    """Options with some replaced by the fields of a request. Raises RequestError for a wrong type."""
    if not fields:
        return options
    kwargs = fields.get("chat_template_kwargs", {})
    return replace(
        options,
        kwargs={**options.kwargs, **kwargs} if isinstance(kwargs, Mapping) else kwargs,
        add_generation_prompt=fields.get("add_generation_prompt", options.add_generation_prompt),
        continue_final_message=fields.get("continue_final_message", options.continue_final_message),
    )


def _asked(request: GenerationRequest) -> dict[str, Any]:
    """What a request asks for beside its prompt, sampling and tools, for its key."""
    asked: dict[str, Any] = {"lora": request.adapter} if request.adapter else {}
    if request.messages is None:
        return asked
    template = request.template
    if template.kwargs:
        asked["chat_template_kwargs"] = {name: json.dumps(value) for name, value in template.kwargs.items()}
    if template.continue_final_message:
        asked["continue_final_message"] = True
    elif not template.begins_new_message:
        asked["add_generation_prompt"] = False
    if request.choice is not None:
        asked["tool_choice"] = {"name": request.choice.name}
    if request.tools and request.max_calls is not None:
        asked["max_calls"] = request.max_calls
    return asked


def check_adapter(name: str, known: Iterable[str]) -> None:
    """Raises RequestError for a name that is neither that of an adapter nor empty."""
    names = list(known)
    if not name or name in names:
        return
    shown = f"there are {', '.join(names)}" if names else "none is loaded; --lora NAME=PATH loads one"
    raise RequestError("invalid_row", f"there is no LoRA adapter {name[:60]!r}: {shown}")


def _has_system(messages: Sequence[Message]) -> bool:
    return any(message["role"] == "system" for message in messages)


@lru_cache(maxsize=256)
def _merge_params(base: SamplingParams, given: tuple[tuple[str, type, Any], ...]) -> tuple[SamplingParams, bytes]:
    """`given` has the types of the values, because true and 1.0 equal 1 but are not whole numbers."""
    params = base.merged({name: value for name, _, value in given})
    return params, canonical_params(params)
