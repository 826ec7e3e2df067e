"""The engine that programs use: safe to share between threads, streams and tasks of asyncio."""

from __future__ import annotations

import asyncio
import logging
import math
import os
import queue
import secrets
import threading
import weakref
from collections.abc import AsyncGenerator, Callable, Generator, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, closing, suppress
from dataclasses import fields, replace
from functools import partial
from operator import attrgetter
from types import MappingProxyType
from typing import Any, TypedDict, Unpack, overload

import numpy as np
import torch
from numpy.typing import NDArray
from tqdm import tqdm

from cbatch.base.chat_template_options import DEFAULT_TEMPLATE, TemplateOptions
from cbatch.base.config import EngineConfig, EngineOptions
from cbatch.base.errors import ConfigError, EngineError, RequestError, invalid_row
from cbatch.base.params import SamplingOptions, SamplingParams
from cbatch.base.request import ParamsLike, Request, RequestDefaults
from cbatch.base.spelling import similar_name
from cbatch.batch.answer_cache import DEFAULT_CACHE_SIZE, CacheConfig
from cbatch.batch.lines import RowOptions
from cbatch.batch.map import map_rows
from cbatch.engine.loop import OnStep
from cbatch.engine.stats import EngineStats
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.engine.streams import AsyncStream, Mailbox, Received, RequestGroup, Stream
from cbatch.engine.thread import FORKED, EngineThread
from cbatch.model.base import Model
from cbatch.model.loader import LoadedModel
from cbatch.requests.completion import Completion, Completions, Score, failure_sentence
from cbatch.requests.output_processor import OutputProcessor
from cbatch.requests.prompts import (
    Conversation,
    PromptLike,
    list_conversations,
    list_params,
    list_prompts,
    plain,
    read_prompt,
    row_fields,
    with_options,
)
from cbatch.requests.rows import CHAT, set_defaults
from cbatch.requests.scores import CHOICES, SCORE
from cbatch.schedule.limits import EngineLimits
from cbatch.text.tokenizer import ChatTokenizer, Prompt
from cbatch.tools.tool import ToolLike, load_tools
from cbatch.validation.validation import CheckLike, Validation, as_checks

OnePrompt = PromptLike
ManyPrompts = Sequence[PromptLike]
AnyPrompts = OnePrompt | ManyPrompts
OneText = str | Sequence[int]
ManyTexts = OneText | Sequence[OneText]
SeveralTexts = list[str] | list[list[int]]

Params = ParamsLike | Sequence[ParamsLike | None] | None
"""Sampling parameters for all prompts, one for each, or None for the model's own defaults."""


OTHER_NAMES = {
    "model_path": "model", "model_id": "model", "pretrained_model_name_or_path": "model",
    "max_num_seqs": "max_seqs", "max_num_batched_tokens": "max_batch_tokens", "num_gpu_blocks_override": "kv_blocks",
    "kv_cache_dtype": "kv_dtype", "enable_prefix_caching": "prefix_cache", "tensor_parallel_size": "tensor_parallel",
    "n_threads": "threads", "num_thread": "threads", "torch_dtype": "dtype",
    "n_ctx": "max_model_len", "num_ctx": "max_model_len", "context_length": "max_model_len",
}  # fmt: skip
"""Options of vLLM, transformers, llama-cpp-python and ollama, and ours that mean the same."""

FOREIGN_OPTIONS = {
    "gpu_memory_utilization": 'use kv_cache_memory="90%".',
    "quantization": 'a model\'s own format is found; quantize="int8" rounds weights.',
    "load_in_8bit": 'use quantize="int8".',
    "load_in_4bit": 'use quantize="int4".',
    "enforce_eager": "use cuda_graphs=False.",
    "attention_backend": "use attention.",
    "attn_implementation": "use attention.",
    "enable_lora": 'use lora={"name": folder}.',
    "lora_modules": 'use lora={"name": folder}.',
    "trust_remote_code": "code that comes with a model is never run.",
    "n_gpu_layers": 'use device="cuda", or device_map="auto" for a model that is larger than the GPU.',
    "tokenizer": "the tokenizer is that of the model's folder.",
    "seed": "each call has a seed.",
}
"""Options of theirs that have another form here, or none."""

DTYPE_NAMES = {"half": "float16", "fp16": "float16", "bf16": "bfloat16", "fp32": "float32", "float": "float32"}

EMPTY: Mapping[str, Any] = MappingProxyType({})
_log = logging.getLogger("cbatch")

EXIT_SECONDS = 2.0
"""How long a program that ends without closing its engine waits for the step in flight."""


class ChatOptions(TypedDict, total=False):
    """Options of `Engine.chat`, by the names of OpenAI's and vLLM's APIs.

    tools:                   functions that the model may call: of Python, or described in OpenAI's form
    system:                  system message of a conversation that has none
    tool_choice:             `auto`, `none`, `required`, or `{"type": "function", "function": {"name": ...}}`
    parallel_tool_calls:     false keeps only the first call of an output
    chat_template_kwargs:    variables for the chat template, such as `enable_thinking`
    continue_final_message:  continue the last message instead of beginning a new one
    add_generation_prompt:   whether the prompt ends with the beginning of the model's message
    """

    tools: Sequence[Mapping[str, Any] | Callable[..., Any]]
    system: str
    tool_choice: str | Mapping[str, Any]
    parallel_tool_calls: bool
    chat_template_kwargs: Mapping[str, Any]
    continue_final_message: bool
    add_generation_prompt: bool


class _CallOptions(SamplingOptions, total=False):
    seed: int | None
    progress: bool


class _ChatCallOptions(ChatOptions, _CallOptions, total=False):
    pass


def _of_core(name: str, setter: Callable[[Engine, Any], None] | None = None) -> Any:
    return property(attrgetter(f"core.{name}"), setter)


class Engine(AbstractContextManager["Engine"]):
    """A model that generates for any number of callers at once, in batches that change with every step.

    Every method may be called from any thread. One thread of the engine's own, which starts with the first request,
    runs all steps and hands the tokens to whoever asked for them. Close an engine that you have made, by `close` or a
    `with` block. An engine that you do not close is closed when it is freed, or when the program ends.

    core:        the engine below, which that thread steps; what it says of itself may be read from any thread
    config:      its options
    loaded:      the model, its tokenizer and its own settings
    model:       the model as the engine runs it. Raises EngineError if the engine is closed
    tokenizer:   the model's tokenizer and chat template; None if it has none
    device:      where the model is
    attention:   name of the attention backend
    fingerprint: a hash of everything about the model that decides its output: no paths, no times, no device
    limits:      how long sequences can get, and how much the engine takes at once
    on_step:     called once for each step, after the model has run (see `StepLoop`)
    """

    def __init__(
        self,
        model: str | os.PathLike[str] | EngineConfig | None = None,
        *,
        loaded: LoadedModel | None = None,
        **options: Unpack[EngineOptions],
    ) -> None:
        """
        model:   folder or hub id, or a whole EngineConfig; None: the bundled demo model
        loaded:  a model that is in memory already, instead of `model`
        options: further fields of EngineConfig

        Raises ModelError if the model cannot be loaded or is not supported, and ConfigError for options that cannot be
        met.
        """
        self.core = SteppingEngine(_make_config(model, options), loaded)
        self._process = os.getpid()
        self._starting = threading.Lock()
        self._threads: list[EngineThread] = []
        """The thread, once something has needed it."""
        self._finalizer = weakref.finalize(self, _close, self.core, self._threads, self._process, EXIT_SECONDS)

    @overload
    def generate(  # type: ignore[overload-overlap]  # a text is a list of texts, for mypy
        self, prompts: OnePrompt, params: Params = None, **options: Unpack[_CallOptions]
    ) -> Completion: ...

    @overload
    def generate(self, prompts: ManyPrompts, params: Params = None, **options: Unpack[_CallOptions]) -> Completions: ...

    def generate(
        self, prompts: Any, params: Params = None, *, seed: int | None = 0, progress: bool = False, **sampling: Any
    ) -> Any:
        """Completes one prompt, or several together; returns a completion, or a list of them in the same order.

        prompts:  a text (one user message if the model has a chat template), token ids, a row as `cbatch run` takes it,
                  or a list of these
        params:   sampling parameters for all prompts or one for each: objects, or mappings that are put on top of the
                  model's own defaults
        seed:     seed of all randomness; the same one gives the same outputs, so that a loop of one call gives one
                  text for ever, at any temperature. None takes a new one at each call
        progress: whether to show a progress bar on stderr
        sampling: sampling parameters by their names, on top of `params`: `generate(prompts, max_tokens=50)`

        A prompt that cannot be served does not raise: its completion has an `error`, a warning is logged at the end,
        and `raise_for_errors` of the list raises. Raises RequestError if the arguments themselves are wrong,
        ConfigError if they need a package that is not installed, and EngineError if the engine is closed.
        """
        progress = sampling.get("use_tqdm", progress)
        values, is_single = list_prompts(prompts)
        results = self._complete(len(values), self._encoded(values, params, seed, sampling), progress=progress)
        return results[0] if is_single else results

    @overload
    def chat(
        self, conversations: str | Conversation, params: Params = None, **options: Unpack[_ChatCallOptions]
    ) -> Completion: ...

    @overload
    def chat(
        self, conversations: Sequence[Conversation], params: Params = None, **options: Unpack[_ChatCallOptions]
    ) -> Completions: ...

    def chat(
        self,
        conversations: Any = None,
        params: Params = None,
        *,
        seed: int | None = 0,
        progress: bool = False,
        **options: Any,
    ) -> Any:
        """The model's next message in one conversation, or in several together.

        conversations: a list of messages, `[{"role": "user", "content": "Hi"}]`, or a list of such lists
        options:       see ChatOptions; the other arguments, the result and errors are those of `generate`
        """
        progress = options.get("use_tqdm", progress)
        values, is_single = list_conversations(options.pop("messages", conversations))
        requests = self._encoded(values, params, seed, *_chat_fields(options))
        results = self._complete(len(values), requests, progress=progress)
        return results[0] if is_single else results

    def stream(
        self, prompts: AnyPrompts, params: Params = None, *, seed: int | None = 0, **sampling: Unpack[SamplingOptions]
    ) -> Stream:
        """Completes one prompt, or several together; the result gives an event for each token as it comes.

        `event.index` is the number of the prompt, `event.text` its new text; the last event of each prompt has its
        `completion`. Any number of streams may be open, also beside `generate`. Arguments and errors are those of
        `generate`.
        """
        values, _ = list_prompts(prompts)
        return Stream(self.thread, list(self._encoded(values, params, seed, sampling)), owner=self)

    @overload
    async def agenerate(  # type: ignore[overload-overlap]
        self, prompts: OnePrompt, params: Params = None, **options: Unpack[_CallOptions]
    ) -> Completion: ...

    @overload
    async def agenerate(
        self, prompts: ManyPrompts, params: Params = None, **options: Unpack[_CallOptions]
    ) -> Completions: ...

    async def agenerate(
        self, prompts: Any, params: Params = None, *, seed: int | None = 0, progress: bool = False, **sampling: Any
    ) -> Any:
        """`generate` for asyncio: other tasks run meanwhile. A task that is cancelled cancels its requests."""
        values, is_single = list_prompts(prompts)
        encode = partial(self._encoded, values, params, seed, sampling)
        results = await self._acomplete(len(values), encode, progress=progress)
        return results[0] if is_single else results

    @overload
    async def achat(
        self, conversations: str | Conversation, params: Params = None, **options: Unpack[_ChatCallOptions]
    ) -> Completion: ...

    @overload
    async def achat(
        self, conversations: Sequence[Conversation], params: Params = None, **options: Unpack[_ChatCallOptions]
    ) -> Completions: ...

    async def achat(
        self,
        conversations: Any = None,
        params: Params = None,
        *,
        seed: int | None = 0,
        progress: bool = False,
        **options: Any,
    ) -> Any:
        """`chat` for asyncio, as `agenerate`."""
        values, is_single = list_conversations(options.pop("messages", conversations))
        encode = partial(self._encoded, values, params, seed, *_chat_fields(options))
        results = await self._acomplete(len(values), encode, progress=progress)
        return results[0] if is_single else results

    def astream(
        self, prompts: AnyPrompts, params: Params = None, *, seed: int | None = 0, **sampling: Unpack[SamplingOptions]
    ) -> AsyncStream:
        """`stream` for asyncio: `async for event in engine.astream(...)`."""
        values, _ = list_prompts(prompts)
        thread, requests = self.thread, self._encoded(values, params, seed, sampling)
        return AsyncStream(thread, lambda: list(requests), owner=self)

    @overload
    def score(  # type: ignore[overload-overlap]
        self, texts: OneText, continuations: OneText | None = None, *, top: int = 0, lora: str = ""
    ) -> Score: ...

    @overload
    def score(
        self, texts: ManyTexts, continuations: Sequence[SeveralTexts], *, top: int = 0, lora: str = ""
    ) -> list[list[Score]]: ...

    @overload
    def score(
        self, texts: ManyTexts, continuations: Sequence[OneText] | None = None, *, top: int = 0, lora: str = ""
    ) -> list[Score]: ...

    def score(self, texts: Any, continuations: Any = None, *, top: int = 0, lora: str = "") -> Any:
        """How likely the model finds a text, or each of several. Nothing is generated.

        texts:         plain text, which no chat template is put around, or token ids; one or a list
        continuations: texts that follow; then only their tokens are scored. If the end of a text and the beginning of
                       its continuation are one token, that token counts. Each text may have a list of them, and then
                       has a list of scores; what they share is computed once
        top:           how many of the most likely tokens are reported in the place of each, at most 20
        lora:          name of the LoRA adapter that scores them; empty: none

        The first token of a text has no score, unless it is the only one or a continuation's: then the token that
        begins texts comes before it, or else the one that ends them. A text that cannot be scored, such as an empty
        one, has an `error` in its score. Raises RequestError if there is not one continuation for each text.
        """
        requests, scores = self._scoring(texts, continuations, top, lora)
        return scores(self._complete(len(requests), requests))

    @overload
    async def ascore(  # type: ignore[overload-overlap]
        self, texts: OneText, continuations: OneText | None = None, *, top: int = 0, lora: str = ""
    ) -> Score: ...

    @overload
    async def ascore(
        self, texts: ManyTexts, continuations: Sequence[SeveralTexts], *, top: int = 0, lora: str = ""
    ) -> list[list[Score]]: ...

    @overload
    async def ascore(
        self, texts: ManyTexts, continuations: Sequence[OneText] | None = None, *, top: int = 0, lora: str = ""
    ) -> list[Score]: ...

    async def ascore(self, texts: Any, continuations: Any = None, *, top: int = 0, lora: str = "") -> Any:
        """`score` for asyncio, as `agenerate`."""
        requests, scores = await asyncio.to_thread(self._scoring, texts, continuations, top, lora)
        return scores(await self._acomplete(len(requests), lambda: requests))

    def classify(self, texts: Any, continuations: Any = None, *, lora: str = "") -> Any:
        """Classifies a text by the model's classification head, into a `Classification`, or each of several.

        texts:         as `score` takes them; a query, for rerankers
        continuations: texts that follow, as `score` takes them, with the same lists as the result; documents, for these

        Raises RequestError for a text that cannot be classified, and if the model has no such head.
        """
        requests, found = self._scoring(texts, continuations, 0, lora, classifies=True)
        return found(self._complete(len(requests), requests).raise_for_errors())

    async def aclassify(self, texts: Any, continuations: Any = None, *, lora: str = "") -> Any:
        """`classify` for asyncio, as `agenerate`."""
        requests, found = await asyncio.to_thread(self._scoring, texts, continuations, 0, lora, classifies=True)
        return found((await self._acomplete(len(requests), lambda: requests)).raise_for_errors())

    def embed(
        self, texts: ManyTexts, dimensions: int | None = None, *, prompt_name: str | None = None, lora: str = ""
    ) -> NDArray[np.float32]:
        """Embeddings of texts: [N, D] float32, or [D] of a single text, as the model's own files say (see `Pooling`).

        texts:       plain text, which no chat template is put around, or token ids; one or a list
        dimensions:  how many numbers of each are kept, the first ones, of length 1 again; None for all
        prompt_name: of the instruction in front of each text, among those of the model's files; None for its default
        lora:        name of the LoRA adapter that embeds them; empty: none

        Raises RequestError for a text that cannot be embedded, such as one that is longer than the model's context.
        """
        requests, is_single = self._embedding(texts, dimensions, prompt_name, lora)
        return _stacked(self._complete(len(requests), requests), is_single=is_single)

    async def aembed(
        self, texts: ManyTexts, dimensions: int | None = None, *, prompt_name: str | None = None, lora: str = ""
    ) -> NDArray[np.float32]:
        """`embed` for asyncio, as `agenerate`."""
        requests, is_single = await asyncio.to_thread(self._embedding, texts, dimensions, prompt_name, lora)
        return _stacked(await self._acomplete(len(requests), lambda: requests), is_single=is_single)

    def _embedding(
        self, texts: Any, dimensions: int | None, prompt_name: str | None, lora: str
    ) -> tuple[list[Request | Completion], bool]:
        """Requests that embed texts, and whether there is a single one."""
        values, is_single = list_prompts(texts)
        fields = {"embed": True, "dimensions": dimensions, "prompt_name": prompt_name, "lora": lora}
        rows = [{"input": plain(one), **fields} for one in values]
        return list(self._encoded(rows, None, 0)), is_single

    def _scoring(
        self, texts: Any, continuations: Any, top: int, lora: str, *, classifies: bool = False
    ) -> tuple[list[Request | Completion], Callable[[Iterable[Completion]], Any]]:
        """Requests whose prompts are scored or classified, and what makes scores of their completions."""
        if classifies != (self.core.loaded.classifier is not None):
            lacking = "no classification head (those of a class ForSequenceClassification have one): call score."
            raise invalid_row(f"The model has {lacking if classifies else 'a classification head: call classify.'}")
        values, is_single = list_prompts(texts)
        after: list[Any] = [None] * len(values)
        if continuations is not None:
            after, is_one = list_prompts(continuations)
            after = [after] if is_single and not is_one else after
        if len(after) != len(values):
            raise invalid_row(f"Each text needs one continuation: there are {len(values):,} and {len(after):,}.")
        rows, thens = [], [plain(one) for one in after]
        for text, then in zip(map(plain, values), thens, strict=True):
            asked = {"prompt_token_ids": text} if isinstance(text, list) else {"prompt": text, "raw": True}
            choices = [] if then is None else then if _are_several(then) else [then]
            rows.append({**asked, SCORE: True, **({CHOICES: choices} if choices else {})})
        requests = list(self._encoded(rows, {"logprobs": top, "lora": lora}, 0))

        def scores(completions: Iterable[Completion]) -> Any:
            made: list[Any] = []
            for then, completion in zip(thens, completions, strict=True):
                ranked = sorted(completion.choices, key=attrgetter("index"))
                found = [one.score or Score(math.nan, error=completion.error) for one in ranked]
                if _are_several(then):
                    made.append(found if completion.error is None else found * len(then))
                else:
                    made.append(found[0])
            return made[0] if is_single else made

        return requests, scores

    def map(
        self,
        rows: Iterable[Any],
        *,
        template: str | os.PathLike[str] | Callable[[Any], Any] | None = None,
        params: ParamsLike | None = None,
        seed: int | None = 0,
        system: str | None = None,
        progress: bool = False,
        path: str | os.PathLike[str] | None = None,
        resume: bool = False,
        ordered: bool = True,
        window: int | None = None,
        validate: CheckLike | Sequence[CheckLike] | None = None,
        tries: int = 1,
        tell_error: bool = False,
        cache: str | os.PathLike[str] | None = None,
        cache_size: str = DEFAULT_CACHE_SIZE,
        tools: Iterable[ToolLike] = (),
        **sampling: Unpack[SamplingOptions],
    ) -> MapResults:
        """Yields the result of each row, lazily and in bounded memory; `rows` may be endless.

        rows:     texts, token ids, lists of messages, or rows as `cbatch run` takes them; read on a thread of their
                  own, at most `window` rows ahead of the results that were taken
        template: makes the prompts: a text with {column} in it, the path of a Jinja template, or a function of the
                  row. Columns other than `id` are data then, whatever their names; a row that the function returns is
                  taken as it is
        params:   sampling parameters of all rows, an object or a mapping; those of a row come on top
        seed:     seed from which rows without one get theirs, by their `id` or their number; None takes a new one,
                  and cannot be used with a `path`
        system:   system message of conversations that have none
        progress: whether to show a progress bar on stderr
        path:     file that gets each result before it is yielded, as `cbatch run -o` writes it
        resume:   continue a file that an earlier call or `cbatch run` has left; its rows are not computed again
        ordered:  whether results come in the order of the rows, or as they finish
        window:   most rows between taking and yielding; None means four times the requests that run at once
        validate: what makes an answer good: a JSON schema, a function of its text that returns False or what is wrong,
                  a text as `--validate` takes it, or a list of these; a row without a good answer has an error
        tries:    most answers for a row, with another seed each
        tell_error: whether the model sees its answer and what is wrong with it at its next try
        cache:    folder in which answers are kept, and from which they are taken; `cache_size`: the most it may take
        tools:    what the model may call: functions, which run here without limits, and files as `--tools` takes them

        sampling: sampling parameters by their names, on top of `params`

        A row that is wrong has a result with an error. Leaving the iteration cancels what is in flight; `resume`
        continues there.

        Raises RequestError for wrong `params`, `seed` or `system`, and ConfigError for other options that are wrong.
        While iterating: ConfigError if the file cannot be written, or holds rows that are in the way; EngineError if
        the engine fails; RunFailed if writing fails; and what `rows` raises, after the results of all rows before it.
        """
        params = with_options(params, sampling)
        if not isinstance(params, SamplingParams | Mapping | None):
            kind = type(params).__name__
            raise invalid_row(f"params must be SamplingParams or a mapping for all rows, not {kind}.")
        if seed is None and path is not None:
            raise ConfigError("seed=None takes new randomness, which resume could not repeat; give a seed with a path.")
        run_seed = secrets.randbits(64) if seed is None else seed
        thread = self.thread
        options = RowOptions(
            RequestDefaults(params=plain(params or {}), seed=run_seed, system=system),
            validation=Validation.of(as_checks(validate), tries=tries, tells_error=tell_error),
            cache=CacheConfig(os.fspath(cache), cache_size) if cache is not None else None,
            tools=tuple(load_tools(tools)),
        )
        results, interrupt = map_rows(
            thread, options, rows, template=template, path=path, resume=resume, ordered=ordered, window=window
        )
        total = len(rows) if isinstance(rows, Sized) else None
        make_bar = partial(_Progress, total, "row", shown=progress)
        return MapResults(_results_of(self, thread, results, make_bar), interrupt)

    def amap(self, rows: Iterable[Any], **options: Any) -> AsyncGenerator[Completion]:
        """`map` for asyncio, with its arguments: `async for done in engine.amap(rows)`. `rows` are read on a thread."""
        return _amapped(self.map(rows, **options))

    @property
    def thread(self) -> EngineThread:
        """The thread that steps the engine; this starts it. Raises EngineError if the engine is closed."""
        if os.getpid() != self._process:
            raise EngineError(FORKED)
        with self._starting:
            if not self._finalizer.alive:
                raise EngineError("The engine is closed.")
            if not self._threads:
                self._threads.append(EngineThread(self.core))
        return self._threads[0]

    @property
    def failure(self) -> BaseException | None:
        """Why the engine failed for good, if it did."""
        return self._threads[0].failure if self._threads else None

    def close(self) -> None:
        """Frees the memory of weights, KV cache and graphs, and ends the engine's threads. May be called twice.

        Unfinished requests end with an error (`cancelled`), wherever somebody waits for them. Afterwards, methods that
        generate raise EngineError.
        """
        if os.getpid() == self._process:  # in a forked child, the lock may be held for ever
            with self._starting:
                self._finalizer.detach()
            _close(self.core, self._threads, self._process)

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        closed = ", closed" if self.core.runner.is_closed else ""
        return f"Engine({self.core.loaded.name!r}, device={str(self.core.device)!r}{closed})"

    config: EngineConfig = _of_core("config")
    loaded: LoadedModel = _of_core("loaded")
    model: Model = _of_core("model")
    tokenizer: ChatTokenizer | None = _of_core("tokenizer")
    device: torch.device = _of_core("device")
    attention: str = _of_core("attention")
    fingerprint: str = _of_core("fingerprint")
    limits: EngineLimits = _of_core("limits")
    on_step: OnStep | None = _of_core("on_step", lambda self, on_step: setattr(self.core, "on_step", on_step))

    def stats(self) -> EngineStats:
        """The engine's present work and its totals so far."""
        return self._threads[0].stats() if self._threads else self.core.stats()

    def encode(
        self, prompt: Prompt, *, raw: bool = False, template: TemplateOptions = DEFAULT_TEMPLATE, answer: str = ""
    ) -> list[int]:
        """Token ids of a prompt. Text is one user message if the model has a chat template, else plain text.

        raw:      take text as plain text even if the model has a chat template
        template: options of the chat template
        answer:   beginning of the assistant's answer, which the model is to continue

        Raises RequestError if the prompt cannot be encoded.
        """
        if not isinstance(prompt, str | Mapping) and any(isinstance(one, str) for one in prompt):
            raise invalid_row("encode takes one prompt, and not a list of texts.")
        return self.core.encode(prompt, raw=raw, template=template, answer=answer)

    def get_tokenizer(self) -> ChatTokenizer | None:
        """`tokenizer`, as vLLM calls it."""
        return self.core.tokenizer

    def tokenize(self, text: str | bytes) -> list[int]:
        """Token ids of plain text, as llama-cpp-python calls it. Raises RequestError if the model has no tokenizer."""
        return self.core.encode(text if isinstance(text, str) else text.decode(), raw=True)

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool = True) -> str:
        """The text of token ids. Raises RequestError if the model has no tokenizer."""
        if self.core.tokenizer is None:
            raise invalid_row("This model has no tokenizer.")
        return self.core.tokenizer.decode(plain(token_ids), skip_special_tokens=skip_special_tokens)

    def detokenize(self, token_ids: Sequence[int]) -> str:
        """`decode` with special tokens, as llama-cpp-python calls it."""
        return self.decode(token_ids, skip_special_tokens=False)

    @property
    def n_ctx(self) -> int:
        """Tokens of the model's context, `limits.max_model_len`, as llama-cpp-python calls it."""
        return self.core.limits.max_model_len

    def create_chat_completion(self, messages: Conversation, **body: Any) -> dict[str, Any]:
        """The model's next message as a ChatCompletion of OpenAI's API, a dictionary, as llama-cpp-python gives it.

        body: further fields of such a request, such as `max_tokens` or `tools`

        Raises RequestError if the request cannot be served.
        """
        row = {"custom_id": "", "url": CHAT, "body": {"messages": messages, **body}}
        answer: dict[str, Any] = self.generate(row).raise_for_error()["response"]["body"]
        return answer

    def _encoded(
        self,
        prompts: Sequence[Any],
        params: Params,
        seed: int | None,
        sampling: Mapping[str, Any] = EMPTY,
        fields: Mapping[str, Any] = EMPTY,
    ) -> Iterator[Request | Completion]:
        """Requests for the engine, one for each prompt; for a prompt that is refused, its result.

        sampling: parameters that the call names itself
        fields:   further fields of each prompt's row

        Raises RequestError now, and not for each prompt, if an argument is wrong for all of them.
        """
        params, fields = with_options(params, sampling), row_fields(fields)
        each = list_params(params, len(prompts))
        shared = plain(params) if isinstance(params, SamplingParams | Mapping) else {}
        run_seed = secrets.randbits(64) if seed is None else seed
        processor = self.core.input_processor(RequestDefaults(params=shared, seed=run_seed))
        processor.request(read_prompt({"messages": [{"role": "user", "content": "?"}]} if fields else "?", 0, fields))

        def requests() -> Iterator[Request | Completion]:
            for index, (prompt, asked) in enumerate(zip(prompts, each, strict=True)):
                row = read_prompt(prompt, index, fields)
                complete = asked if asked is not params and not isinstance(asked, Mapping) else None
                if asked is not params and isinstance(asked, Mapping):  # they differ from prompt to prompt
                    set_defaults(row, asked)
                yield processor.process(row, partial(_data_of, prompt), complete)

        return requests()

    def _complete(self, count: int, requests: Iterable[Request | Completion], *, progress: bool = False) -> Completions:
        thread, finished = self.thread, queue.SimpleQueue[Received]()
        thread.check_may_wait()
        with closing(RequestGroup(thread)) as group, _Progress(count, "prompt", shown=progress) as bar:
            ended = _submit(group, requests, finished.put)
            for one in ended:
                bar.count(one if isinstance(one, Completion) else group.next_of(finished))
        return _completions(ended)

    async def _acomplete(
        self, count: int, encode: Callable[[], Iterable[Request | Completion]], *, progress: bool = False
    ) -> Completions:
        thread = self.thread
        thread.check_may_wait()
        requests, mailbox = await asyncio.to_thread(lambda: list(encode())), Mailbox()
        with closing(RequestGroup(thread)) as group, _Progress(count, "prompt", shown=progress) as bar:
            ended = _submit(group, requests, mailbox.put)
            for one in ended:
                bar.count(one if isinstance(one, Completion) else await mailbox.get(group))
        return await asyncio.to_thread(_completions, ended)


LLM = Engine
"""The name that users of vLLM look for."""


class _Progress(AbstractContextManager["_Progress"]):
    """Counts results, in a bar if that is asked for, and logs a warning at the end if some have an error."""

    def __init__(self, total: int | None, unit: str, *, shown: bool) -> None:
        self._bar = tqdm(total=total, unit=f" {unit}s") if shown else None  # it starts a thread even if it is disabled
        self._unit, self._num_taken, self._num_failed = unit, 0, 0
        self._first: RequestError | None = None

    def count(self, result: Any) -> None:
        """Takes a completion, or what was received of its request, whose last event says whether there is an error."""
        error = (result[1] if isinstance(result, tuple) else result).error
        if error is not None and error.code == "cancelled":  # the program has closed the engine
            error = None
        self._first = self._first or error
        self._num_taken += 1
        self._num_failed += error is not None
        if self._bar is not None:
            if self._first is not None:
                self._bar.set_postfix(failed=self._num_failed, refresh=False)
            self._bar.update()

    def __exit__(self, *error: object) -> None:
        if self._bar is not None:
            self._bar.close()
        if self._first is not None:
            _log.warning("%s", failure_sentence(self._num_failed, self._num_taken, self._unit, self._first))


def _submit(
    group: RequestGroup, requests: Iterable[Request | Completion], put: Callable[[Received], None]
) -> list[Completion | OutputProcessor]:
    return [group.submit(one, put, only_last=True) if isinstance(one, Request) else one for one in requests]


def _stacked(results: Completions, *, is_single: bool) -> NDArray[np.float32]:
    """The embedding of each result, [N, D]. Raises RequestError if any has failed."""
    made = [one.embeddings[0] for one in results.raise_for_errors() if one.embeddings]
    return made[0] if is_single else np.stack(made) if made else np.empty((0, 0), np.float32)


def _completions(ended: Sequence[Completion | OutputProcessor]) -> Completions:
    return Completions(one if isinstance(one, Completion) else one.completion() for one in ended)


class MapResults(Iterator[Completion], AbstractContextManager["MapResults"]):
    """The results of `Engine.map`, as they come. Leaving them cancels what is in flight, `close` at once."""

    def __init__(self, results: Generator[Completion], interrupt: Callable[[], None]) -> None:
        """`interrupt`: ends `results`, also while another thread waits for the next one"""
        self._results, self.interrupt, self._reading = results, interrupt, threading.Lock()
        weakref.finalize(self, _end_map, interrupt, weakref.ref(results))

    def __next__(self) -> Completion:
        with self._reading:
            return next(self._results)

    def close(self) -> None:
        with self._reading:
            self._results.close()

    def __exit__(self, *error: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return "MapResults: iterate over them"


def _end_map(interrupt: Callable[[], None], results: weakref.ref[Generator[Completion]]) -> None:
    """Ends results that nobody has any more, or at the end of the program, when a thread may still wait for them."""
    interrupt()
    if (left := results()) is not None:
        with suppress(ValueError):  # that thread executes them
            left.close()


async def _amapped(results: MapResults) -> AsyncGenerator[Completion]:
    try:
        while (result := await asyncio.to_thread(next, results, None)) is not None:
            yield result
    finally:
        results.interrupt()
        await asyncio.to_thread(results.close)


def _results_of(
    engine: Engine,
    thread: EngineThread,
    results: Generator[Completion],
    make_bar: Callable[[], _Progress],
) -> Generator[Completion]:
    """Results of rows. They keep their engine, since one that nobody holds is closed."""
    with closing(results), make_bar() as bar:  # only now: an iteration that never begins would not close it
        thread.check_may_wait()
        for result in results:
            bar.count(result)
            yield result
            thread.check_may_wait()


def _chat_fields(options: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The options of a chat that are sampling parameters, and those that are fields of its rows.

    Raises TypeError for a misspelt option.
    """
    known = ChatOptions.__annotations__
    for name in options.keys() - known:
        if meant := similar_name(name, known):
            raise TypeError(f"Engine.chat has no argument {name!r}; did you mean {meant}?")
    of_rows = {name: value for name, value in options.items() if name in known}
    return {name: value for name, value in options.items() if name not in known}, of_rows


def _data_of(prompt: Any) -> bytes:
    """The stand-in for a refused prompt in its key."""
    return repr(prompt).encode("utf-8", "replace")


def _are_several(then: Any) -> bool:
    """Whether what follows a text is a list of continuations, and not one text or its token ids."""
    return isinstance(then, list) and bool(then) and not isinstance(then[0], int)


def _close(core: SteppingEngine, threads: list[EngineThread], process: int, timeout_s: float | None = None) -> None:
    """Ends an engine and waits for it as long as is given. Does not know the Engine, which may be freed."""
    if os.getpid() != process:  # the parent's engine goes on
        return
    if threads:
        threads[0].close(close_engine=True, timeout_s=timeout_s)
    else:
        core.close()


def _make_config(model: str | os.PathLike[str] | EngineConfig | None, options: Mapping[str, Any]) -> EngineConfig:
    known, own = [field.name for field in fields(EngineConfig)], dict[str, Any]()
    for name, value in options.items():
        meant = OTHER_NAMES.get(name, name)
        if meant in own or (meant == "model" and model is not None):
            raise ConfigError(f"{name} is another name of {meant}, which is given, too.")
        if meant in known:
            own[meant] = value
        elif name not in FOREIGN_OPTIONS or value not in (None, False):
            similar = similar_name(name, [*known, *OTHER_NAMES])
            hint = f"did you mean {similar}?" if similar else "help(cbatch.EngineConfig) describes those it has."
            raise ConfigError(f"An engine has no option {name!r}: {FOREIGN_OPTIONS.get(name, hint)}")
    if "dtype" in own:
        name = str(own["dtype"]).removeprefix("torch.")
        own["dtype"] = DTYPE_NAMES.get(name, name)
    if isinstance(model, EngineConfig):
        return replace(model, **own)
    model = own.pop("model", model)
    if model is not None and not isinstance(model, str | os.PathLike):
        raise ConfigError(f"The model must be a folder, a hub id or an EngineConfig, not {type(model).__name__}.")
    return EngineConfig(model=None if model is None else os.fspath(model), **own)
