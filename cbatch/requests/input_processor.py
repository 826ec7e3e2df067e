"""From a row or a prompt to a request that the engine can run."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass, field, replace
from functools import cached_property, lru_cache, partial
from itertools import chain
from typing import Any

from cbatch.base.chat_template_options import TemplateOptions, effort_variables
from cbatch.base.errors import RequestError, as_error, invalid_row
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request, RequestDefaults, ToolChoice
from cbatch.extras import require_package
from cbatch.media.pictures import NO_IMAGES, MediaSources
from cbatch.model.images import Images
from cbatch.model.pooling import Pooling
from cbatch.requests.completion import Completion
from cbatch.requests.embeddings import check_embedding, encode_inputs, params_of
from cbatch.requests.param_names import own_params
from cbatch.requests.row_keys import KeyMaker, canonical_params
from cbatch.requests.scores import check_ranking, scoring_params, set_classified, set_tails
from cbatch.sample.structured.grammar import CompiledGrammar
from cbatch.schedule.limits import SequenceLimits
from cbatch.text.tokenizer import ChatTokenizer
from cbatch.text.truncation import cut_ids, fit_text


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelInfo:
    """Facts about a model that its requests depend on.

    tokenizer:      None if the model has none; it takes token ids only
    default_params: the model's own sampling parameters
    limits:         how long sequences can get
    fingerprint:    hash of the model, for keys
    first_id:       the token before the first of a text, if the model has one
    adapters:       fingerprints of its LoRA adapters by name
    pooling:        reads how its hidden states become an embedding. Raises ModelError
    labels:         those of its classification head; empty without one
    images:         what it makes of pictures, or why it takes none
    compile:        compiles the constraint of a request (see `SteppingEngine.compile`)
    """

    tokenizer: ChatTokenizer | None
    default_params: SamplingParams
    limits: SequenceLimits
    fingerprint: str
    compile: Callable[[SamplingParams, Sequence[Mapping[str, Any]], ToolChoice | None], CompiledGrammar | None]
    first_id: int | None = None
    adapters: Mapping[str, str] = field(default_factory=dict)
    pooling: Callable[[], Pooling] = Pooling
    labels: Sequence[str] = ()
    images: Images | str = NO_IMAGES


class InputProcessor:
    """Applies defaults to rows, and turns them into token ids. May be used by several threads at once."""

    def __init__(self, model: ModelInfo, defaults: RequestDefaults) -> None:
        """Raises RequestError if the defaults are wrong, and ConfigError if they need what is not installed."""
        self._model, self._defaults, self._tokenizer = model, defaults, model.tokenizer
        self._has_template = model.tokenizer is not None and bool(model.tokenizer.chat_template)
        params = defaults.params
        template: dict[str, Any] = {}
        if isinstance(params, SamplingParams):
            self._params = self._openai_params = params
        else:
            given, template = own_params(params)
            self._params = self._openai_params = model.default_params.merged(given)
            if "max_tokens" not in given:  # OpenAI's API has no default of its own
                self._openai_params = replace(self._params, max_tokens=None)
        if self._params.constraint is not None:  # now, instead of an error for each request
            require_package("llguidance")
            model.compile(self._params, (), None)
        self._media = MediaSources(defaults.media_root or ".", defaults.allow_remote_media)
        self._template = _with_fields(defaults.template, template)
        self._effort_fields(self._params, self._has_template)  # now, instead of an error for each request

    @property
    def limits(self) -> SequenceLimits:
        """How long sequences of the model can get."""
        return self._model.limits

    @cached_property
    def _keys(self) -> KeyMaker:
        model, tokenizer = self._model.fingerprint, self._tokenizer
        if tokenizer is not None:
            model += self._defaults.template.today.isoformat() if tokenizer.template_has_clock else ""
            model += tokenizer.chosen_format
        return KeyMaker(model)

    def request(self, row: Request, params: SamplingParams | None = None) -> Request:
        """Applies the defaults to a row, which it returns.

        params: complete parameters, instead of the model's own and the defaults; those of the row come on top

        Raises RequestError, which says where the row stands, for a row that is invalid or does not fit the model.
        """
        if row.error is not None:
            raise row.error
        with _locating(row, "the row cannot be read"):
            defaults = self._defaults
            self.take_pictures(row)
            effective, sampling = self._sampling(row, params)
            row.labels = self._model.labels if row.continuations else ()
            if row.continuations or row.embed is not None:
                scored = scoring_params(effective) if row.embed is None else effective
                effective = params_of(effective) if row.is_pooled else scored
                sampling = canonical_params(effective)
            if row.call is not None and row.call.top_n is not None:
                check_ranking(row.labels)
            if effective.n > 1 and row.call is not None and row.call.repeated:
                raise invalid_row("n is not available: a Response has one output")
            adapters, model = self._model.adapters, row.call.model if row.call is not None else None
            if model is not None and model in adapters and "lora" not in row.given:
                effective = replace(effective, lora=model)  # as for servers of vLLM
            check_adapter(effective.lora, adapters)
            row.params = effective
            row.adapter = adapters[row.params.lora] if row.params.lora else ""
            row.seed = row.derived_seed(defaults.seed) if effective.seed is None else effective.seed
            embedded = list[object]()
            if row.embed is not None:
                row.seed, embedded = 0, check_embedding(row, row.embed, self._model.pooling)
            if row.tools and (not self._has_template or defaults.raw):
                raise invalid_row(f"tools need the chat template, {self._why_no_template()}")
            if row.tools and (self._tokenizer is None or not self._tokenizer.takes_tools):
                raise invalid_row("this model's chat template takes no tools")
            row.columns = defaults.columns
            if row.text is not None and self._has_template and not (row.raw or defaults.raw):
                row.text, row.messages = None, [{"role": "user", "content": row.text}]
            self._add_system(row)
            asked = row.messages is not None or "reasoning_effort" in row.given
            effort = self._effort_fields(effective, row.messages is not None) if asked else {}
            row.template = _with_fields(_with_fields(self._template, effort), row.given_template)
            limit, limits = None, self._model.limits
            # Then the cache may cut off the output earlier than the context.
            if limits.cache_is_small and not row.continuations:
                with suppress(RequestError):  # `encode` will say it
                    row.prompt_ids = self._fitting_ids(row)
                    limit = limits.limit_of_cache(len(row.prompt_ids), effective.max_tokens)
            row.key = self._keys.for_row(row, sampling, row.seed, "token_ids" in row.columns, limit, *embedded)
        return row

    def take_pictures(self, row: Request) -> None:
        """Reads the pictures that a row gives. Raises RequestError."""
        if row.given_pictures:
            if isinstance(self._model.images, str):
                raise invalid_row(self._model.images)
            if row.continuations and self._model.labels:
                raise invalid_row("images go with rows that are answered or scored, not with those that are classified")
            media = self._media
            row.pictures = [(media.video if len(one) == 3 else media.picture)(*one) for one in row.given_pictures]
            row.given_pictures = ()  # which may be large

    def set_image_texts(self, request: Request) -> None:
        """Sets what stands for the pictures of a request in its prompt, which decodes them. Raises RequestError."""
        if request.pictures and request.image_texts is None and isinstance(self._model.images, Images):
            request.image_texts = self._model.images.texts(request.pictures)

    def encode(self, request: Request) -> Request:
        """Sets a request's token ids and compiles its constraint. Raises RequestError as `request` does."""
        with _locating(request, "the prompt cannot be encoded"):
            tokenizer, params = self._tokenizer, request.params
            if request.embed is not None:
                encode_inputs(request, self._model.pooling(), self._input_ids)
                return request
            if request.labels:
                self._model.pooling()  # which raises for a model that shows no hidden states
                set_classified(request, self._input_ids)
                return request
            if request.continuations:
                self.set_image_texts(request)
                encode = partial(encoded_ids, tokenizer=tokenizer, context=self.limits.context)
                set_tails(request, encode, self._model.first_id, partial(self.limits.max_new_tokens, at_least=0))
            else:
                request.prompt_ids = self._fitting_ids(request)
            if request.pictures and isinstance(self._model.images, Images):
                self._model.images.place(request)
            if request.continuations:
                return request
            prompt_ids = request.prompt_ids
            self._model.limits.max_new_tokens(len(prompt_ids), at_least=0)  # else many too long ones would wait for it
            request.grammar = self._model.compile(params, request.tools, request.choice)
            if params.bad_words and tokenizer is not None:
                tokenizer.bad_word_ids(params.bad_words)  # fills a cache here, not on the engine's thread
            request.prefix = request.answer
            if tokenizer is not None and request.messages is not None and prompt_ids:
                request.is_reply, request.tags = True, tokenizer.visible_tokens(with_calls=bool(request.tools))
                if request.template.continue_final_message:
                    request.prefix = str(request.messages[-1]["content"])
                request.opens_thinking = tokenizer.opens_thinking(prompt_ids, request.prefix)
                request.is_thinking = tokenizer.is_thinking_after(request.prefix, opened=request.opens_thinking)
        return request

    def refused(self, row: Request, error: RequestError, data: bytes) -> Completion:
        """The result of a row for which `request` raises.

        data: the bytes that the row was read from, which make its key
        """
        row.key = self._keys.for_invalid_row(data)
        return Completion(row, error=error)

    def process(
        self, row: Request, data: Callable[[], bytes], params: SamplingParams | None = None
    ) -> Request | Completion:
        """A row ready for the engine; or, if anything is wrong with it, its result. Takes what `request` takes.

        data: gives the bytes that the row was read from
        """
        try:
            return self.encode(self.request(row, params))
        except RequestError as error:
            return Completion(row, error=error) if row.key else self.refused(row, error, data())

    def _fitting_ids(self, request: Request) -> Sequence[int]:
        """The token ids of a prompt, cut if it asks for that. Raises RequestError as `encoded_ids`."""
        tokenizer, context, asked = self._tokenizer, self.limits.context, request.params.truncate_prompt
        self.set_image_texts(request)
        try:
            ids = encoded_ids(request, tokenizer, context)
        except RequestError as error:
            if asked is None or error.code != "prompt_too_long":
                raise
            ids = ()
        if asked is None:
            return ids
        side, _, most = asked.partition(":")
        answer = context if request.params.max_tokens is None else request.params.max_tokens
        limit = min(context - min(answer, context // 2), int(most or context))
        if 0 < len(ids) <= limit:
            return ids
        if tokenizer is None or (request.text is None and request.messages is None):
            request.dropped_tokens = len(ids) - limit
            return cut_ids(ids, limit, side)
        messages: list[dict[str, Any]] = deepcopy([*map(dict, request.messages or ())])
        ours = [message for message in messages if message["role"] == "user"]
        texts = [(one, "content") for one in ours if isinstance(one["content"], str)]
        beside_images = chain.from_iterable(one["content"] for one in ours if not isinstance(one["content"], str))
        texts += [(part, "text") for part in beside_images if "text" in part]
        longest, name = max(texts, key=lambda one: len(one[0][one[1]]), default=({"text": request.text or ""}, "text"))

        def ids_with(text: str) -> Sequence[int]:
            longest[name] = text
            changed = replace(request, text=text) if request.messages is None else replace(request, messages=messages)
            return encoded_ids(changed, tokenizer, 2 * context)  # so long may be the first text and what surrounds it

        text = longest[name]
        starts, count = tokenizer.token_starts, lambda shown: len(ids_with(shown))
        try:
            text, request.dropped_tokens = fit_text(text, limit, side, starts=starts, count=count)
        except RequestError as error:
            reason = f"The prompt cannot be cut to {limit:,} tokens: it has more around its longest user message."
            raise RequestError(error.code, reason if error.code == "prompt_too_long" else str(error)) from error
        return ids_with(text)

    def _input_ids(self, request: Request) -> Sequence[int]:
        """The token ids of a text that is embedded or classified. Raises RequestError."""
        ids = self._fitting_ids(request)
        self._model.limits.max_new_tokens(len(ids), at_least=0)
        return ids

    def _effort_fields(self, params: SamplingParams, has_template: bool) -> dict[str, Any]:
        """Fields for the chat template that say how much to reason. Raises RequestError if it cannot be told."""
        if params.reasoning_effort is None:
            return {}
        source = self._tokenizer.template_source if self._tokenizer is not None and has_template else ""
        return {"chat_template_kwargs": effort_variables(params.reasoning_effort, source)}

    def _add_system(self, row: Request) -> None:
        messages = row.messages
        if messages is None:
            if row.system or row.given_template:
                name = "system" if row.system else next(iter(row.given_template))
                raise invalid_row(f"{name} needs the chat template, {self._why_no_template()}")
        elif any(message["role"] == "system" for message in messages):
            if row.system:
                raise invalid_row("the row has both system and a message with that role")
        elif (system := row.system or self._defaults.system) is not None:
            row.messages = [{"role": "system", "content": system}, *messages]

    def _sampling(self, row: Request, complete: SamplingParams | None) -> tuple[SamplingParams, bytes]:
        """A row's effective parameters, and their form in its key. Most rows of a run share both."""
        base = complete or (self._openai_params if row.call else self._params)
        given = tuple((name, type(value), value) for name, value in row.given.items())
        try:
            params, canonical = _merge_params(base, given)
        except TypeError:  # a list, such as stop strings, has no hash
            params, canonical = _merge_params.__wrapped__(base, given)
        is_text_call = row.call is not None and not row.call.is_chat
        if is_text_call and params.echo and params.logprobs is not None and params.prompt_logprobs is None:
            params = replace(params, prompt_logprobs=params.logprobs)  # this API scores what it echoes
        return params, canonical

    def _why_no_template(self) -> str:
        if not self._has_template:
            return "and this model has none"
        return "and --raw skips it" if self._defaults.raw else "which this prompt does not go through"


def encoded_ids(request: Request, tokenizer: ChatTokenizer | None, context: int | None = None) -> Sequence[int]:
    """The token ids of a request's prompt. Raises RequestError if it cannot be encoded.

    context: a prompt of far more tokens is refused before all of them are made
    """
    if request.prompt_ids or (request.text is None and request.messages is None):
        return request.prompt_ids
    if tokenizer is None:
        raise invalid_row("This model has no tokenizer; give prompt_token_ids.")
    if request.messages is None:
        return tokenizer.encode(request.text or "", context=context)
    tools, template = request.tools, request.template
    return tokenizer.encode_chat(
        request.messages,
        tools=tools,
        template=template,
        answer=request.answer,
        images=request.image_texts,
        context=context,
    )


@contextmanager
def _locating(row: Request, problem: str) -> Iterator[None]:
    """Lets errors say where the row stands. A row that breaks something harms no other.

    problem: what is said if anything but a RequestError is raised
    """
    try:
        yield
    except RequestError as error:
        raise row.located(error) from error
    except BaseException as raised:
        unforeseen = as_error(raised)
        raise row.invalid(f"{problem}: {unforeseen!r}", "internal_error") from unforeseen


def _with_fields(options: TemplateOptions, fields: Mapping[str, Any]) -> TemplateOptions:
    if not fields:
        return options
    changes = dict(fields)
    kwargs = changes.pop("chat_template_kwargs", {})
    return replace(options, kwargs={**options.kwargs, **kwargs} if isinstance(kwargs, Mapping) else kwargs, **changes)


def check_adapter(name: str, known: Iterable[str]) -> None:
    """Raises RequestError for a name that is neither that of an adapter nor empty."""
    names = list(known)
    if not name or name in names:
        return
    shown = f"there are {', '.join(names)}" if names else "none is loaded; --lora NAME=PATH loads one"
    raise invalid_row(f"there is no LoRA adapter {name[:60]!r}: {shown}")


@lru_cache(maxsize=256)
def _merge_params(base: SamplingParams, given: tuple[tuple[str, type, Any], ...]) -> tuple[SamplingParams, bytes]:
    """`given` has the types of the values, because true and 1.0 equal 1 but are not whole numbers."""
    params = base.merged({name: value for name, _, value in given})
    return params, canonical_params(params)
