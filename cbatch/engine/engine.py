"""The engine: requests in, tokens out, one step at a time."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, suppress
from functools import partial

from cbatch.engine.attention.registry import check_attention, check_quantize, has_fast_path, select_attention
from cbatch.engine.base.config import EngineConfig
from cbatch.engine.base.errors import RequestError
from cbatch.engine.base.outputs import TokenEvent
from cbatch.engine.base.params import SamplingParams
from cbatch.engine.base.template_options import DEFAULT_TEMPLATE, TemplateOptions
from cbatch.engine.base.units import parse_memory
from cbatch.engine.execution.kv_cache_sizing import make_runner
from cbatch.engine.execution.loop import EngineCore
from cbatch.engine.execution.stats import EngineStats, StepRecord
from cbatch.engine.generation import GenerationMixin
from cbatch.engine.models.base import Model
from cbatch.engine.models.loader import LoadedModel, choose_device, load_model
from cbatch.engine.models.self_check import checked_model
from cbatch.engine.runtime.memory import release_memory
from cbatch.engine.runtime.transfer import synchronize
from cbatch.engine.sampling.processors import counts_for
from cbatch.engine.scheduler.block_pool import BlockPool
from cbatch.engine.scheduler.limits import EngineLimits, StepLimits
from cbatch.engine.scheduler.request import Request
from cbatch.engine.scheduler.scheduler import Scheduler
from cbatch.engine.scheduler.step_time import MIN_PREFILL_TOKENS, StepTimeController
from cbatch.engine.structured.compiler import ConstraintCompiler
from cbatch.engine.structured.grammar import CompiledGrammar, GrammarState
from cbatch.engine.text.detokenizer import NUM_CONTEXT_TOKENS, OutputDetokenizer
from cbatch.engine.text.tokenizer import Prompt, encode_prompt


class Engine(GenerationMixin, AbstractContextManager["Engine"]):
    """A model, its paged KV cache and a scheduler.

    `add`, `cancel`, `step` and `close` belong to one thread; `EngineThread` serves several. Close an engine that you
    have made, by `close` or a `with` block. `scheduler` and `runner` are its parts, to look into, not to call.

    Raises ModelError if the model cannot be loaded or is not supported, and ConfigError for options that cannot be met.
    """

    def __init__(self, config: EngineConfig | None = None, loaded: LoadedModel | None = None) -> None:
        """`loaded`: a model that is in memory already, instead of `config.model`."""
        self.config = config = config or EngineConfig()
        device = choose_device(config.device)
        check_attention(config.attention, device, config.block_size)
        if config.kv_cache_memory is not None:
            parse_memory(config.kv_cache_memory, free=0)  # raises before a model is loaded
        fast = has_fast_path(config.attention, device, config.block_size)
        quantize = check_quantize(config.quantize, device, fast=fast)
        step_time = StepTimeController(config.target_step_ms, MIN_PREFILL_TOKENS[device.type])
        self.loaded = loaded or load_model(
            config.model, config.revision, device, config.dtype, fast=fast, quantize=quantize
        )
        self.tokenizer = self.loaded.tokenizer
        model: Model = self.loaded.fast_model if fast and self.loaded.fast_model else checked_model(self.loaded.network)
        self.device = model.device
        seqs, tokens = (256, 2048) if self.device.type == "cuda" else (32, 512)
        limits = StepLimits(config.max_seqs or seqs, config.max_batch_tokens or tokens, config.cuda_graphs)
        attention = select_attention(config.attention, self.device, model.layers, config.block_size, model.dtype)
        self.runner = make_runner(config, model, attention, limits)
        self._kv_bytes_per_token = sum(layer.bytes_per_token(model.dtype) for layer in model.layers)
        pool = BlockPool(self.runner.num_blocks, config.block_size)
        self.scheduler = Scheduler(pool, limits, model.max_model_len, prefix_cache=config.prefix_cache)
        overlap = self.device.type == "cuda" if config.run_ahead is None else config.run_ahead
        self._core = EngineCore(self.scheduler, self.runner, step_time, overlap=overlap)
        self._constraint_compiler = ConstraintCompiler(self.tokenizer, model.vocab_size) if self.tokenizer else None
        self._requests: dict[int, Request] = {}
        self._next_id = 0
        self.on_step: Callable[[StepRecord], None] | None = None
        """Called once for each step, after the model has run; None (the default) costs nothing.

        While it is set, the engine waits for the device before and after each run of the model, to measure its time.
        `step` raises what the callable raises.
        """

    @property
    def model(self) -> Model:
        """The model. Raises EngineError if the engine is closed."""
        return self.runner.model

    @property
    def fingerprint(self) -> str:
        """A hash of everything about the model that decides its output: no paths, no times, no device."""
        template = self.tokenizer.templates if self.tokenizer else None
        dtype = self.config.quantize or str(self.model.dtype)
        parts = [self.loaded.fingerprint, dtype, template, sorted(self.loaded.eos_ids)]
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    @property
    def has_work(self) -> bool:
        """Whether `step` would advance a request or return events."""
        return self._core.has_work

    @property
    def limits(self) -> EngineLimits:
        """How long sequences can get, and how much the engine takes at once."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        return EngineLimits(
            max_seqs=scheduler.max_seqs,
            max_batch_tokens=scheduler.max_batch_tokens,
            max_model_len=scheduler.sequence_limits.context,
            block_size=pool.block_size,
            num_blocks=pool.num_blocks,
            kv_bytes_per_token=self._kv_bytes_per_token,
        )

    @property
    def attention(self) -> str:
        """Name of the attention backend."""
        return self.runner.attention.name

    def stats(self) -> EngineStats:
        """What the engine is doing and has done so far; may be called from any thread."""
        scheduler, pool = self.scheduler, self.scheduler.pool
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            used_blocks=pool.num_used,
            cache_used=pool.num_used / pool.num_blocks,
            num_steps=self._core.num_steps,
            num_preemptions=scheduler.num_preemptions,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            held_back=dict(scheduler.held_back),
        )

    def encode(
        self, prompt: Prompt, *, raw: bool = False, template: TemplateOptions = DEFAULT_TEMPLATE, answer: str = ""
    ) -> list[int]:
        """Token ids of a prompt. Text is one user message if the model has a chat template, else plain text.

        raw:      take text as plain text even if the model has a chat template
        template: options of the chat template
        answer:   beginning of the assistant's answer, which the model is to continue

        Raises RequestError if the prompt cannot be encoded.
        """
        return encode_prompt(self.tokenizer, prompt, raw=raw, template=template, answer=answer)

    def add(
        self,
        prompt: Prompt,
        params: SamplingParams,
        *,
        seed: int = 0,
        priority: int = 0,
        sample_index: int = 0,
        tags: Sequence[str] = (),
    ) -> int:
        """Queues one request and returns its id; ids grow with each call.

        seed:         used if the parameters have no seed
        priority:     lower priorities run first
        sample_index: number of this output among several for one prompt and seed, which makes its randomness its own;
                      `params.n` is ignored here, since every output is a request
        tags:         special tokens that stay in the text, so that `OutputParser` can find the parts of an answer

        Raises RequestError for a prompt that is empty, too long, or has tokens outside the vocabulary, and EngineError
        if the engine is closed.
        """
        self.runner.check_open()
        token_ids = self.encode(prompt)
        stop_ids = self._stop_ids(params)
        request = Request(
            id=self._next_id,
            token_ids=token_ids,
            params=params,
            max_new_tokens=self.max_new_tokens(token_ids, params),
            seed=seed if params.seed is None else params.seed,
            sample_index=sample_index,
            priority=priority,
            stop_ids=stop_ids,
            detokenizer=self.tokenizer.detokenizer(token_ids, params, tags) if self.tokenizer and params.stop else None,
            bad_words=self.tokenizer.bad_word_ids(params.bad_words) if self.tokenizer else (),
            grammar_state=self._make_grammar_state(token_ids, params, stop_ids, tags),
            counts=counts_for(params, token_ids),
        )
        self._next_id += 1
        self._requests[request.id] = request
        self.scheduler.add(request)
        return request.id

    def detokenizer(
        self, prompt_ids: Sequence[int], params: SamplingParams, tags: Sequence[str] = ()
    ) -> OutputDetokenizer:
        """Makes the text of a request's output from its events. May be called in any thread; takes what `add` takes."""
        if self.tokenizer is None or params.stop:
            return OutputDetokenizer()
        make = partial(self.tokenizer.detokenizer, list(prompt_ids[-NUM_CONTEXT_TOKENS:]), params, tags)
        return OutputDetokenizer(make, self._stop_ids(params))

    def max_new_tokens(self, prompt_ids: Sequence[int], params: SamplingParams) -> int:
        """Most tokens that such a request can get. Raises RequestError as `add` does."""
        if not prompt_ids:
            raise RequestError("invalid_row", "The prompt is empty.")
        self._check_tokens("Token id", prompt_ids)
        self._check_tokens("stop_token_ids:", params.stop_token_ids)
        self._check_tokens("allowed_token_ids:", params.allowed_token_ids or ())
        self._check_tokens("logit_bias:", [token for token, _ in params.logit_bias])
        for name in ("stop", "bad_words", "echo"):
            if getattr(params, name) and self.tokenizer is None:
                raise RequestError("invalid_row", f"{name} needs a tokenizer, and this model has none.")
        most = self.scheduler.sequence_limits.max_new_tokens(len(prompt_ids), 0 if params.max_tokens == 0 else 1)
        return most if params.max_tokens is None else min(params.max_tokens, most)

    def compile(self, params: SamplingParams) -> CompiledGrammar | None:
        """The compiled constraint of the parameters, or None if they have none. May be called from any thread.

        The engine uses it again while the caller keeps it; otherwise it may have to compile once more. Raises
        RequestError if the constraint is wrong or too complex.
        """
        if (constraint := params.constraint) is None:
            return None
        if self._constraint_compiler is None:
            raise RequestError("invalid_row", "Structured output needs a tokenizer, and this model has none.")
        return self._constraint_compiler.compile(constraint)

    def cancel(self, request_id: int) -> None:
        """Drops a request and frees its blocks. Does nothing if it is finished or unknown."""
        if (request := self._requests.pop(request_id, None)) is not None:
            self._core.cancel(request)

    def step(self) -> list[TokenEvent]:
        """Runs one step and returns an event for each new token.

        If the engine overlaps steps (`EngineConfig.run_ahead`), the events are those of the previous step.

        Raises what the model or the device raises. Nothing is lost then: call it again to retry the step.
        """
        self.runner.check_open()
        return self._forget_finished(self._core.step(self.on_step))

    def flush(self) -> list[TokenEvent]:
        """The events of steps that are already computed; no further step is started."""
        return self._forget_finished(self._core.flush())

    def _forget_finished(self, events: list[TokenEvent]) -> list[TokenEvent]:
        for event in events:
            if event.request_id is not None and event.finish_reason is not None:
                del self._requests[event.request_id]
        return events

    def synchronize(self) -> None:
        """Waits until the device has done all its work, so that time can be measured."""
        synchronize(self.device)

    def zero_cache(self) -> None:
        """Overwrites the KV cache with zeros, so that the system commits its memory; only while no request runs."""
        for tensor in (*self.runner.kv_cache.keys, *self.runner.kv_cache.values):
            tensor.zero_()

    def shrink(self) -> bool:
        """Halves the size of steps, from that of the latest one; False if that had one token. See `EngineThread`."""
        return self.scheduler.shrink(self._core.last_scheduled.num_tokens)

    def grow(self) -> bool:
        """Doubles the size of steps, up to the configured one; True if that is reached."""
        return self.scheduler.grow()

    def close(self) -> None:
        """Frees the memory of weights, KV cache and graphs, and ends the engine's threads. May be called twice.

        Afterwards `add` and `step` raise EngineError; unfinished requests get no further event. A model that was passed
        as `loaded` stays in memory while its owner keeps it, and so does what libraries keep for the whole process (the
        workspace of cuBLAS).
        """
        if self.runner.is_closed:
            return
        self._core.close()
        if self._constraint_compiler is not None:
            self._constraint_compiler.close()
        with suppress(RuntimeError):  # a device that is lost has nothing to give back
            self.synchronize()
        self.runner.close()
        self.loaded = self.loaded.without_weights()
        with suppress(RuntimeError):
            release_memory(self.device)

    def __exit__(self, *error: object) -> None:
        self.close()

    def _make_grammar_state(
        self, prompt_ids: list[int], params: SamplingParams, stop_ids: frozenset[int], tags: Sequence[str]
    ) -> GrammarState | None:
        """The state of the output's constraint, which begins after the reasoning if the prompt has opened that."""
        grammar = self.compile(params)
        if grammar is None or self.tokenizer is None:
            return None
        thinks = bool(tags) and self.tokenizer.opens_thinking(prompt_ids)
        return GrammarState(grammar, stop_ids, self.tokenizer.ends_thinking if thinks else None)

    def _stop_ids(self, params: SamplingParams) -> frozenset[int]:
        """Tokens that end an output."""
        return frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self.loaded.eos_ids)

    def _check_tokens(self, what: str, token_ids: Sequence[int]) -> None:
        vocabulary = self.model.vocab_size
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocabulary):
            wrong = next(token for token in token_ids if not 0 <= token < vocabulary)
            shown = wrong if wrong.bit_length() < 100 else "that has so many digits"
            raise RequestError("invalid_row", f"{what} {shown} is not in the model's vocabulary of {vocabulary}.")
