"""Loads the model of an engine, alone or together with other processes, and makes what runs its steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError
from cbatch.base.units import parse_memory
from cbatch.engine.fallback import choose_execution
from cbatch.engine.followers import Followers
from cbatch.engine.kv_cache_sizing import CacheSize, context_of, default_step_size, make_runner, measure_cache
from cbatch.engine.model_runner import Execution, ModelRunner
from cbatch.model.base import Model
from cbatch.model.float8 import tell_float8
from cbatch.model.hf.memory_check import weight_bytes
from cbatch.model.hf.self_check import checked_model
from cbatch.model.hf.vision import Vision
from cbatch.model.load_plan import LoadPlan
from cbatch.model.loader import LoadedModel, check_adapters, load_model
from cbatch.model.lora_files import Adapter, read_adapters
from cbatch.model.ops.shards import WHOLE
from cbatch.runtime.cpu import choose_threads, num_threads
from cbatch.runtime.device import is_accelerator, is_cuda, usable_gpus
from cbatch.runtime.memory import device_memory
from cbatch.schedule.limits import StepLimits

_WEIGHT_SHARE = 0.8
"""Of the free memory of a GPU, which weights may take; the rest is for the KV cache and for steps."""


def load_runner(
    config: EngineConfig, plan: LoadPlan, loaded: LoadedModel | None = None
) -> tuple[LoadedModel, Execution, Sequence[Adapter], StepLimits, ModelRunner]:
    """Loads the model, unless it is in memory already, with the processes that a config asks for.

    Raises ModelError if it cannot be loaded or is not supported, and ConfigError for options that cannot be met.
    """
    if loaded is not None and getattr(loaded.fast_model, "part", WHOLE) != WHOLE:
        raise ConfigError("The model is a part, which is of use to the engine alone that has loaded it.")
    devices, followers, group = [plan.device] if loaded is not None else choose_devices(config, plan), None, None
    try:
        if len(devices) > 1:
            if not is_accelerator(plan.device):
                choose_threads(config.threads)
                config = replace(config, threads=max(num_threads() // len(devices), 1))
            followers = Followers(config, devices)
            plan = replace(plan, device=devices[0], part=followers.part)
        loaded, execution, adapters = load_execution(config, plan, loaded)
        model = execution.model
        for_images = None
        if isinstance(loaded.vision, Vision) and is_accelerator(model.device):  # before the KV cache takes what is free
            loaded.vision.load()
            for_images = torch.empty(parse_memory(config.media_cache, free=0), dtype=torch.uint8, device=model.device)
        seqs, tokens = default_step_size(model.device, model.weight_bytes)
        tokens = tokens if model.is_causal else max(tokens, context_of(config, model))
        limits = StepLimits(config.max_seqs or seqs, config.max_batch_tokens or tokens, execution.graphs)
        measured = measure_cache(config, execution, limits, len(devices))
        del for_images
        if followers is not None:
            limits, size = followers.agree(limits, measured.size)
            measured, group = measured._replace(size=CacheSize(*size)), followers.form(limits, size)
        runner = make_runner(config, execution, limits, measured, group)
    except BaseException:
        if followers is not None:
            followers.close()
        raise
    runner.followers = followers
    return loaded, execution, adapters, limits, runner


def load_execution(
    config: EngineConfig, plan: LoadPlan, loaded: LoadedModel | None = None
) -> tuple[LoadedModel, Execution, Sequence[Adapter]]:
    """The part of the model that this process has, and the fastest that is right for it. Raises as `load_runner`."""
    adapters = read_adapters(config.lora or {})
    if loaded is None:
        if adapters:
            check_adapters(adapters, plan)
        choose_threads(config.threads)
        loaded = load_model(plan)
    fast_model = loaded.fast_model if plan.fast else None
    model: Model = fast_model or checked_model(loaded.network)
    if config.activations == "fp8":
        tell_float8(model)
    if plan.part.size > 1 and not is_accelerator(plan.device):  # the kernels of a CPU take whole models
        config = replace(config, attention="reference")
    return loaded, choose_execution(config, model.with_adapters(adapters) if adapters else model), adapters


def choose_devices(config: EngineConfig, plan: LoadPlan) -> list[torch.device]:
    """The devices that compute a model together, the first of which schedules. Raises ConfigError if there are too few.

    With `auto`, these are as few GPUs as hold the weights, or one if all do not.
    """
    wanted, first = config.tensor_parallel, plan.device
    if wanted == "auto":
        if not is_cuda(first) or not plan.fast or plan.device_map is not None:
            return [first]
        size = weight_bytes(plan)
        if size <= _room(first):  # no context is made on other GPUs
            return [first]
        gpus = usable_gpus(config.device, first)
        room = min(map(_room, gpus))
        fitting = (number for number in range(2, len(gpus) + 1) if len(gpus) % number == 0 and size <= room * number)
        return gpus[: next(fitting, 1)]
    if wanted == 1:
        return [first]
    if not plan.fast:
        raise ConfigError("--tensor-parallel splits models of the fast path: use --attention auto or triton.")
    if not is_accelerator(first):
        if config.attention == "cpu":
            raise ConfigError("--tensor-parallel on a CPU computes by torch: use --attention auto.")
        return [first] * wanted
    gpus = usable_gpus(config.device, first)
    if len(gpus) < wanted:
        raise ConfigError(
            f"--tensor-parallel {wanted} needs so many GPUs, and --device {config.device} means {len(gpus) or first}."
        )
    return gpus[:wanted]


def _room(gpu: torch.device) -> float:
    """Bytes that weights may take of a GPU."""
    return device_memory(gpu).free() * _WEIGHT_SHARE
