"""The engine that one thread steps: requests in, tokens out."""

from __future__ import annotations

import hashlib
import json
import math
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from cbatch.base.chat_template_options import DEFAULT_TEMPLATE, TemplateOptions
from cbatch.base.config import EngineConfig
from cbatch.base.errors import EngineError, ModelError, RequestError
from cbatch.base.outputs import KnownOutput, TokenEvent
from cbatch.base.params import SamplingParams
from cbatch.base.request import Request, RequestDefaults, ToolChoice
from cbatch.base.units import format_bytes, format_count, parse_memory
from cbatch.engine.fallback import configured_execution
from cbatch.engine.kv_cache_sizing import context_of
from cbatch.engine.loading import load_runner
from cbatch.engine.loop import StepLoop
from cbatch.engine.model_runner import ModelRunner
from cbatch.engine.stats import EngineStats
from cbatch.model.base import Model
from cbatch.model.hf.self_check import checked_model
from cbatch.model.hf.vision import Vision
from cbatch.model.images import Images
from cbatch.model.load_plan import LoadPlan
from cbatch.model.loader import LoadedModel
from cbatch.model.pooling import Pooling
from cbatch.requests.input_processor import InputProcessor, ModelInfo, check_adapter, encoded_ids
from cbatch.requests.output_processor import OutputProcessor
from cbatch.runtime.cpu import describe_threads
from cbatch.runtime.device import is_accelerator, pins_memory
from cbatch.runtime.memory import release_memory
from cbatch.runtime.transfer import synchronize
from cbatch.sample.output import MAX_ELEMENTS
from cbatch.sample.processors import counts_for
from cbatch.sample.structured.compiler import ConstraintCompiler
from cbatch.sample.structured.grammar import CompiledGrammar, GrammarState
from cbatch.sample.structured.lark import request_constraint
from cbatch.sample.structured.reasoning import ReasoningState
from cbatch.schedule.block_pool import BlockPool
from cbatch.schedule.limits import EngineLimits, StepLimits
from cbatch.schedule.scheduler import Scheduler
from cbatch.schedule.sequence import OutputGuide, TokenSequence
from cbatch.schedule.state_slots import StateSlots
from cbatch.schedule.step_time import MIN_PREFILL_TOKENS, StepTimeController
from cbatch.text.tokenizer import Prompt

if TYPE_CHECKING:
    from cbatch.engine.kernel_checks.kernel_check import KernelCheck


class SteppingEngine(StepLoop, AbstractContextManager["SteppingEngine"]):
    """A model, its paged KV cache and a scheduler, for programs that run the steps themselves.

    `add`, `cancel`, `step` and `flush` belong to one thread, the first that calls one of them, and refuse any other;
    `Engine` serves any number of threads. Close an engine that you have made, by `close` or a `with` block. `scheduler`
    and `runner` are its parts, to look into, not to call; `config`, `loaded`, `tokenizer`, `device` and `on_step` are
    as those of an `Engine`.

    Raises ModelError if the model cannot be loaded or is not supported, and ConfigError for options that cannot be met.
    """

    def __init__(self, config: EngineConfig | None = None, loaded: LoadedModel | None = None) -> None:
        """`loaded`: a model that is in memory already, instead of `config.model`."""
        self.config = config = config or EngineConfig()
        plan = LoadPlan.of(config)
        kind = "gpu" if is_accelerator(plan.device) else "cpu"
        step_time = StepTimeController(config.target_step_ms, MIN_PREFILL_TOKENS[kind])
        self.loaded, execution, adapters, limits, runner = load_runner(config, plan, loaded)
        model, self.device = runner.model, runner.model.device
        self.tokenizer = self.loaded.tokenizer
        self._adapters = {adapter.name: adapter.fingerprint() for adapter in adapters}
        self._adapter_parameters = sum(adapter.num_parameters for adapter in adapters)
        self._fallback = " ".join(filter(None, (execution.fallback, runner.graph_problem)))
        scheduler = _make_scheduler(config, runner, limits)
        self._limits = _limits_of(scheduler, runner)
        overlap = pins_memory(self.device) if config.run_ahead is None else config.run_ahead
        super().__init__(scheduler, runner, execution.sampler, step_time, overlap=overlap)
        if isinstance(self.loaded.vision, Vision):
            alone = config.deterministic or self.device.type == "cpu"
            most_bytes = parse_memory(config.media_cache, free=0)
            self._images = Images(self.loaded.vision, self.device, most_bytes, alone=alone)
            scheduler.num_ready = self._images.num_ready
        self._constraint_compiler = ConstraintCompiler(self.tokenizer, model.vocab_size) if self.tokenizer else None
        self._requests: dict[int, list[TokenSequence]] = {}
        self._owner: threading.Thread | None = None
        self._claiming = threading.Lock()
        self._next_id = 0

    @property
    def model(self) -> Model:
        """The model. Raises EngineError if the engine is closed."""
        return self.runner.model

    @property
    def fingerprint(self) -> str:
        """See `Engine`."""
        template = self.tokenizer.templates if self.tokenizer else None
        dtype = str(getattr(self.model, "quantization", None) or self.model.dtype)
        parts = [self.loaded.fingerprint, dtype, template, sorted(self.loaded.eos_ids)]
        if self.config.state_dtype != "auto" and self.model.states:
            parts.append(f"states in {self.config.state_dtype}")
        if self.limits.max_model_len < self.model.max_model_len:
            parts.append(f"context {self.limits.max_model_len}")
        if self.config.kv_dtype != "auto":
            parts.append(f"KV cache in {self.config.kv_dtype}")
        return hashlib.blake2b(json.dumps(parts).encode(), digest_size=16).hexdigest()

    @property
    def fingerprint_parts(self) -> dict[str, str]:
        """The parts that decide `fingerprint`, by names for people; # begins a hash."""
        templates = json.dumps(self.tokenizer.templates if self.tokenizer else None)
        parts = {name: f"#{value}" for name, value in self.loaded.parts.items() if name != "all"}
        parts = parts or {"model": f"#{self.loaded.fingerprint}"}
        return parts | {
            "dtype": str(getattr(self.model, "quantization", None) or self.model.dtype).removeprefix("torch."),
            "chat template": f"#{hashlib.blake2b(templates.encode(), digest_size=8).hexdigest()}",
            "end tokens": ", ".join(map(str, sorted(self.loaded.eos_ids))),
            "--state-dtype": self.config.state_dtype,
            "--kv-dtype": self.config.kv_dtype,
        }

    @property
    def first_id(self) -> int | None:
        """The token before the first of a text; without a tokenizer, one that ends texts. None if there is none."""
        return min(self.loaded.eos_ids, default=None) if self.tokenizer is None else self.tokenizer.first_id

    @property
    def limits(self) -> EngineLimits:
        """How long sequences can get, and how much the engine takes at once."""
        now = self.scheduler
        return replace(self._limits, max_seqs=now.max_seqs, max_batch_tokens=now.max_batch_tokens)

    @property
    def attention(self) -> str:
        """Name of the attention backend."""
        return self.runner.attention.name

    def describe(self) -> dict[str, str]:
        """The model and the memory that it takes, as names and values for people."""
        model, limits = self.model, self.limits
        per_token, followers = limits.kv_bytes_per_token, self.runner.followers
        share = "" if followers is None else f" in each of {followers.part.size} processes"
        shown = {
            "model": f"{self.loaded.name} ({model.kind})",
            "parameters": f"{model.num_parameters / 1e6:,.1f} million, {format_bytes(model.weight_bytes)}{share}",
            "dtype": str(model.dtype).removeprefix("torch."),
            "device": str(self.device),
            "threads": describe_threads(),
            "attention": self.attention,
            "context": f"{limits.max_model_len:,} tokens",
            "KV cache": f"{limits.cache_tokens:,} tokens in {limits.num_blocks:,} blocks of {limits.block_size}: "
            f"{format_bytes(limits.cache_tokens * per_token)}{share}, {format_bytes(per_token)} a token"
            if per_token
            else "none, since the model has recurrent layers only",
            "batch": f"up to {format_count(limits.max_seqs, 'sequence')} and "
            f"{format_count(limits.max_batch_tokens, 'token')} a step",
        }
        if limits.state_slots:
            shown["states"] = (
                f"{limits.state_slots:,} slots for sequences and snapshots: "
                f"{format_bytes(limits.state_slots * limits.state_bytes)}, {format_bytes(limits.state_bytes)} a slot"
            )
        placement, adapters = self.loaded.placement, ", ".join(self._adapters)
        special = {
            "path": self.loaded.path,
            "weights": self.loaded.stored,
            "in memory": getattr(model, "packed", ""),
            "placement": str(placement or ""),
            "step cost": placement.cost if placement is not None else "",
            "replies": self.tokenizer.reply_format.describe() if self.tokenizer is not None else "",
            "adapters": adapters and f"{adapters}: {self._adapter_parameters / 1e6:,.1f} million parameters",
            "not applied": ", ".join(self.loaded.not_applied),
            "fallback": self._fallback,
        }
        return shown | {name: value for name, value in special.items() if value}

    def stats(self) -> EngineStats:
        """The engine's present work and its totals so far; may be called from any thread."""
        scheduler, pool, images = self.scheduler, self.scheduler.pool, self._images
        return EngineStats(
            num_running=len(scheduler.running),
            num_waiting=len(scheduler.waiting),
            used_blocks=pool.num_used,
            cache_used=pool.num_used / pool.num_blocks,
            num_steps=self._num_steps,
            num_preemptions=scheduler.num_preemptions,
            num_prompt_tokens=scheduler.num_prompt_tokens,
            num_cached_tokens=scheduler.num_cached_tokens,
            num_prefilled_tokens=scheduler.num_prefilled_tokens,
            held_back=dict(scheduler.held_back),
            num_snapshots=scheduler.states.slots.num_snapshots if scheduler.states.slots is not None else 0,
            num_drafted_tokens=scheduler.drafts.num_drafted,
            num_accepted_tokens=scheduler.drafts.num_accepted,
            fallback=self._fallback,
            num_images=images.num_given if images is not None else 0,
            num_encoded_images=images.num_encoded if images is not None else 0,
            images_s=images.encoding_s if images is not None else 0.0,
        )

    def num_computed(self, request: Request) -> int:
        """Tokens of a running request that are in the KV cache; may be called from any thread."""
        return next((one.num_computed for one in list(self.scheduler.running) if one.request is request), 0)

    def input_processor(self, defaults: RequestDefaults | None = None) -> InputProcessor:
        """Makes requests for this engine, of prompts and rows."""
        model = ModelInfo(
            tokenizer=self.tokenizer,
            default_params=self.loaded.defaults,
            limits=self.scheduler.sequence_limits,
            fingerprint=self.fingerprint,
            compile=self.compile,
            first_id=self.first_id,
            adapters=self._adapters,
            pooling=self.pooling,
            images=self._images or str(self.loaded.vision),
            labels=self.loaded.classifier.labels if self.loaded.classifier is not None else (),
        )
        defaults, config = defaults or RequestDefaults(), self.config
        if defaults.media_root is None:
            remote = config.allow_remote_media
            defaults = replace(defaults, media_root=config.media_root, allow_remote_media=remote)
        return InputProcessor(model, defaults)

    def pooling(self) -> Pooling:
        """How the model embeds. Raises ModelError if it cannot, or if its files say that in a way that is not known."""
        if getattr(self.model, "decoder", self) is None:
            raise ModelError(f"{self.model.name} shows no hidden states, so that it cannot embed.")
        return self.loaded.pooling

    def output_processor(self, request: Request) -> OutputProcessor:
        """Makes a request's completion of its events."""
        return OutputProcessor(request, self.tokenizer, self.loaded.eos_ids, self.pooling)

    def encode(
        self, prompt: Prompt, *, raw: bool = False, template: TemplateOptions = DEFAULT_TEMPLATE, answer: str = ""
    ) -> list[int]:
        """See `Engine.encode`."""
        request = Request(template=template, answer=answer)
        if isinstance(prompt, Mapping):
            if "messages" not in prompt:
                raise RequestError("invalid_row", "A prompt that is a mapping must have messages.")
            request.messages, request.tools = prompt["messages"], prompt.get("tools", ())
        elif not isinstance(prompt, str):
            if answer:
                raise RequestError(
                    "invalid_row", "An answer cannot be begun after token ids; put its tokens behind them."
                )
            request.prompt_ids = list(prompt)
        elif raw or self.tokenizer is None or not self.tokenizer.chat_template:
            request.text = prompt + answer
        else:
            request.messages = [{"role": "user", "content": prompt}]
        return list(encoded_ids(request, self.tokenizer))

    def add(self, prompt: Prompt, params: SamplingParams, *, seed: int = 0, priority: int = 0) -> int:
        """Queues a request for a prompt, as `add_request` does.

        seed:     used if the parameters have no seed
        priority: lower priorities run first
        """
        ids = self.encode(prompt)
        return self.add_request(Request(prompt_ids=ids, params=params, seed=seed, priority=priority))

    def add_request(self, request: Request) -> int:
        """Queues one request and returns its id. Ids grow with each call.

        All its outputs (`n`) have this id; their events differ by `sample_index`.
        Outputs go on after the tokens that are known of them, whose events come again, with those of the next step.

        Raises RequestError for a prompt that is empty, too long, or has tokens outside the vocabulary, and for an
        adapter that is not there; EngineError if the engine is closed or belongs to another thread.
        """
        self._check_thread()
        self.runner.check_open()
        params = request.params
        check_adapter(params.lora, self._adapters)
        if not (self.model.generates or request.is_pooled):
            does = (
                "embed: its files hold no output head" if self.model.is_causal else "embed: its tokens see later ones"
            )
            if self.loaded.classifier is not None:
                does = 'classify: ask for scores ("score": true in a row, --score, Engine.classify)'
            raise RequestError("invalid_row", f"The model can only {does}.")
        longest = request.prompt_ids
        if request.tails:
            longest = [*longest, *max((tail.token_ids for tail in request.tails), key=len)]
        request.max_new_tokens = self.max_new_tokens(longest, params, is_pooled=request.is_pooled)
        for tail in request.tails:
            self._check_tokens("Token id", [*tail.token_ids, *tail.last])
        request.grammar = request.grammar or self.compile(params)
        request.stop_ids = request.ends(self.loaded.eos_ids)
        request.bad_words = self.tokenizer.bad_word_ids(params.bad_words) if self.tokenizer else ()
        request.adapter_number = 1 + list(self._adapters).index(params.lora) if params.lora else 0
        is_long = len(longest) + request.max_new_tokens > (self.model.short_context or math.inf)
        request.position_offset = self.model.max_model_len if is_long else 0
        if self._images is not None:
            self._images.num_given += len(request.images)
        request.request_id = self._next_id
        outputs = self._requests[self._next_id] = [
            self._new_sequence(request, number) for number in range(request.num_outputs)
        ]
        self._next_id += len(outputs)
        for output, known in zip(outputs, request.known or [KnownOutput()] * len(outputs), strict=True):
            self._events += self.scheduler.resume(output, known.samples())
        return request.request_id

    def _new_sequence(self, request: Request, number: int) -> TokenSequence:
        """An output of a request. Its constraint begins after the reasoning if the prompt has opened that."""
        tokenizer, params, detokenizer = self.tokenizer, request.params, None
        form: GrammarState | None = None
        if tokenizer is not None and params.stop:
            detokenizer = tokenizer.detokenizer(request.prompt_ids, params, request.tags)
        if tokenizer is not None and request.grammar is not None:
            may_choose = params.allowed_token_ids is None  # else a token that is not allowed could be forced
            form = GrammarState(
                request.grammar,
                request.stop_ids,
                request.max_new_tokens,
                closes=params.close_forms and may_choose,
                forces=may_choose,
            )
        guide: OutputGuide | None = form
        has_budget = request.is_reply and params.thinking_budget is not None
        if tokenizer is not None and tokenizer.reasoning_end and (request.is_thinking if form else has_budget):
            guide = ReasoningState(
                self.model.vocab_size,
                request.stop_ids,
                tokenizer.thinking_place,
                opened=request.is_thinking,
                closing=tokenizer.reasoning_end,
                thinking_budget=params.thinking_budget,
                budget=request.max_new_tokens,
                successor=form,
            )
        ids, scored_from, candidates = list(request.prompt_ids), 1, list[int]()
        if request.tails:
            tail = request.tails[number]
            ids, scored_from, candidates = [*ids, *tail.token_ids], tail.scored_from, list(tail.last)
        counts = counts_for(params, request.prompt_ids)
        pooled = self.pooling().positions(len(ids)) if request.is_pooled else range(0)
        return TokenSequence(
            self._next_id + number, ids, request, number, detokenizer, guide, counts, scored_from, candidates, pooled
        )

    def take_events(self) -> list[TokenEvent]:
        """Events that need no step: of the tokens that requests had already when they were added. Else `step` has them.

        There may be many, so take them after each such request.
        """
        events, self._events = self._events, []
        for event in events:
            request_id = event.request_id
            if event.finish_reason is None or request_id is None:
                continue
            if all(output.has_ended for output in self._requests.get(request_id, ())):
                self._requests.pop(request_id, None)
        return events

    def max_new_tokens(self, prompt_ids: Sequence[int], params: SamplingParams, *, is_pooled: bool = False) -> int:
        """Most tokens that such a request can get; 0 if it `is_pooled`. Raises RequestError as `add` does."""
        if not prompt_ids:
            raise RequestError("invalid_row", "The prompt is empty.")
        self._check_tokens("Token id", prompt_ids)
        self._check_tokens("stop_token_ids:", params.stop_token_ids)
        self._check_tokens("allowed_token_ids:", params.allowed_token_ids or ())
        self._check_tokens("logit_bias:", [token for token, _ in params.logit_bias])
        for name in ("stop", "bad_words", "echo"):
            if getattr(params, name) and self.tokenizer is None:
                raise RequestError("invalid_row", f"{name} needs a tokenizer, and this model has none.")
        least = 0 if params.max_tokens == 0 or is_pooled else 1
        most = self.scheduler.sequence_limits.max_new_tokens(len(prompt_ids), least)
        if is_pooled:
            return 0
        return most if params.max_tokens is None else min(params.max_tokens, most)

    def compile(
        self, params: SamplingParams, tools: Sequence[Mapping[str, Any]] = (), choice: ToolChoice | None = None
    ) -> CompiledGrammar | None:
        """The compiled constraint of a request, or None if it has none. May be called from any thread.

        The engine uses it again while the caller keeps it; otherwise it may have to compile once more.

        tools:  functions that the model may call
        choice: what it must call; None if it need not call any

        Raises RequestError if the constraint is wrong or too complex, or if the model cannot be forced to call tools.
        """
        if (constraint := request_constraint(params, self.tokenizer, tools, choice)) is None:
            return None
        if self._constraint_compiler is None:
            raise RequestError("invalid_row", "Structured output needs a tokenizer, and this model has none.")
        return self._constraint_compiler.compile(constraint)

    def cancel(self, request_id: int) -> None:
        """Drops a request with all its outputs, and frees its blocks. Does nothing if it is finished or unknown."""
        self._check_thread()
        for output in self._requests.pop(request_id, ()):
            self._drop(output)

    def step(self) -> list[TokenEvent]:
        """Runs one step and returns an event for each new token.

        If the engine overlaps steps (`EngineConfig.run_ahead`), the events are those of the previous step.

        Raises what the model or the device raises. Nothing is lost then: call it again to retry the step.
        """
        self._check_thread()
        self.runner.check_open()
        self._run_step()
        return self.take_events()

    def flush(self) -> list[TokenEvent]:
        """The events of steps that are already computed; no further step is started."""
        self._check_thread()
        with suppress(Exception), self._on_device():
            self._complete()
        return self.take_events()

    def release_thread(self) -> None:
        """Lets another thread use the engine from now on: the next one that does."""
        self._owner = None

    def _check_thread(self) -> None:
        """Raises EngineError if the engine belongs to another thread that is still alive."""
        if self._owner is threading.current_thread():
            return
        with self._claiming:
            owner = self._owner
            if owner is not None and owner.is_alive():
                raise EngineError(
                    f"This engine is stepped by the thread {owner.name!r}, and only that thread may use it; "
                    "cbatch.Engine can be used by any number of threads."
                )
            self._owner = threading.current_thread()

    def zero_cache(self) -> None:
        """Overwrites the KV cache with zeros, so that the system commits its memory; only while no request runs."""
        for tensor in (*self.runner.kv_cache.keys, *self.runner.kv_cache.values):
            tensor.zero_()
        if self.runner.state_pool is not None:
            self.runner.state_pool.zero(range(self.runner.state_pool.num_slots))

    def check_kernels(self) -> Iterator[KernelCheck]:
        """Compares each kernel that this model could use on this device with plain torch, one after the other.

        Kernels that the engine does not use because they failed are among them. Only while no request runs; it takes
        seconds. No check is made if torch computes everything.
        """
        from cbatch.engine.kernel_checks.all_checks import check_all

        config, loaded = self.config, self.loaded
        execution = configured_execution(config, self.model if loaded.fast_model is None else loaded.fast_model)
        return check_all(execution, config.block_size, lambda: checked_model(loaded.network))

    def shrink(self) -> bool:
        """Halves the size of steps, from that of the latest one; False if that had one token. See `Scheduler.grow`."""
        return self.scheduler.shrink(self._num_scheduled)

    def close(self) -> None:
        """Frees the memory of weights, KV cache and graphs, and ends the engine's threads. May be called twice.

        Afterwards `add` and `step` raise EngineError; unfinished requests get no further event. A model that was passed
        as `loaded` stays in memory while its owner keeps it, and so does what libraries keep for the whole process (the
        workspace of cuBLAS).

        Raises EngineError if the engine belongs to another thread that is still alive.
        """
        if self.runner.is_closed:
            return
        self._check_thread()
        self._masks.close()
        self._in_flight = None
        if self._images is not None:
            self._images.close()
        if self._constraint_compiler is not None:
            self._constraint_compiler.close()
        with suppress(RuntimeError):  # a device that is lost has nothing to give back
            synchronize(self.device)
        self.runner.close()
        self.loaded = self.loaded.without_weights()
        with suppress(RuntimeError):
            release_memory(self.device)

    def __exit__(self, *error: object) -> None:
        self.close()

    def _check_tokens(self, what: str, token_ids: Sequence[int]) -> None:
        vocabulary = self.model.vocab_size
        if token_ids and not (min(token_ids) >= 0 and max(token_ids) < vocabulary):
            wrong = next(token for token in token_ids if not 0 <= token < vocabulary)
            shown = wrong if wrong.bit_length() < 100 else "that has so many digits"
            raise RequestError("invalid_row", f"{what} {shown} is not in the model's vocabulary of {vocabulary}.")


def _make_scheduler(config: EngineConfig, runner: ModelRunner, limits: StepLimits) -> Scheduler:
    model, state_pool, speculate = runner.model, runner.state_pool, config.speculate
    # On the CPU's own threads, a token has the same bits whatever else is in its step. Elsewhere a draft could change
    # them, and outputs would depend on measured times.
    if speculate == "auto" and not model.has_own_threads:
        speculate = "off"
    return Scheduler(
        BlockPool(runner.num_blocks, config.block_size),
        limits,
        context_of(config, model) if model.is_causal else min(context_of(config, model), limits.max_batch_tokens),
        prefix_cache=config.prefix_cache and model.is_causal,
        whole_prompts=not model.is_causal,
        state_slots=StateSlots(state_pool.num_slots) if state_pool is not None else None,
        chunk_multiple=model.chunk_multiple,
        max_scored=max(MAX_ELEMENTS // model.vocab_size, 1),
        speculate=speculate,
    )


def _limits_of(scheduler: Scheduler, runner: ModelRunner) -> EngineLimits:
    pool, state_pool = scheduler.pool, runner.state_pool
    return EngineLimits(
        max_seqs=scheduler.max_seqs,
        max_batch_tokens=scheduler.max_batch_tokens,
        max_model_len=scheduler.sequence_limits.context,
        block_size=pool.block_size,
        num_blocks=pool.num_blocks,
        kv_bytes_per_token=sum(layer.bytes_per_token(runner.kv_dtype) for layer in runner.model.layers),
        state_slots=state_pool.num_slots if state_pool is not None else 0,
        state_bytes=state_pool.slot_bytes if state_pool is not None else 0,
    )
