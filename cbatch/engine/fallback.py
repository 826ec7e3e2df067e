"""Chooses what computes the steps of an engine: the fastest that agrees with plain torch on this device.

On a GPU every kernel that the model will use is checked when the engine is made. If a kernel of a layer raises or
differs, torch takes its place, and nothing else changes, unless torch waits for the device there: then steps are not
captured. If anything else does, the engine steps down from it:

1. steps captured as CUDA graphs;
2. the same kernels, launched one by one;
3. the operations of a layer by torch, and attention by Triton;
4. attention by torch too (the reference).

Sampling falls back to torch on its own. A model of transformers uses only the attention kernels: if these fail, it
takes the reference. Its steps are captured if its code allows that.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from cbatch.attention.base import AttentionBackend
from cbatch.attention.reference import ReferenceAttention
from cbatch.attention.registry import PerDeviceAttention, check_kv_dtype, select_attention
from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError
from cbatch.engine.model_runner import Execution
from cbatch.model.base import Model
from cbatch.runtime.device import is_accelerator
from cbatch.runtime.kv_cache import U8
from cbatch.runtime.triton_setup import triton_problem
from cbatch.sample.sampler import Sampler

if TYPE_CHECKING:  # the checks are imported when they are made: importing them is part of every start
    from cbatch.engine.kernel_checks.kernel_check import KernelCheck

_log = logging.getLogger("cbatch")


def choose_execution(config: EngineConfig, model: Model) -> Execution:
    """The fastest that is right for a model on its device. What it steps down from is logged as a warning.

    Raises ConfigError if the config names an attention backend that cannot be used as it is, or wants a deterministic
    engine that it cannot have, and ModelError if the device cannot be used at all.
    """
    chosen = configured_execution(config, model)
    if is_accelerator(model.device):  # on a CPU, checks would take much of the start
        chosen = _step_down(chosen, config)
    if chosen.fallback:
        _log.warning("%s", chosen.fallback)
    if config.deterministic:
        check_batch_invariant(chosen.model, chosen.attention)
    return chosen


def check_batch_invariant(model: Model, attention: AttentionBackend) -> None:
    """Raises ConfigError, with the reason, if a token's bits depend on what else is in its step."""
    from cbatch.model.cuda import CudaModel

    if model.batch_invariant and (attention.batch_invariant or not model.layers):
        return
    reason = "operations of torch compute the layers of this model"
    if isinstance(model, CudaModel) and model.ops.batch_invariant:
        reason = "operations of torch compute attention"
        if model.ops.without:
            reason = f"operations of torch take the place of {_listed(model.ops.without)}"
        elif model.states:
            reason = "the kernels for the recurrent layers of this model round a prompt as it is cut"
    raise ConfigError(
        f"--deterministic cannot be promised: {reason} on {model.device}. Leave it out, or choose a model with a fast "
        "path; cbatch info shows the path of a model."
    )


def configured_execution(config: EngineConfig, model: Model) -> Execution:
    """The execution that a config asks for on the model's device, before anything is checked.

    Raises ConfigError if the config names an attention backend that cannot serve the model.
    """
    if config.deterministic:
        from cbatch.model.cuda import CudaModel

        model = model.as_batch_invariant() if isinstance(model, CudaModel) else model
    kv_dtype = check_kv_dtype(config.kv_dtype, config.attention, model.device)
    attention = _attention_of(config, model, kv_dtype)
    if kv_dtype == U8 and model.layers and attention.name != "cpu":
        raise ConfigError(
            f"The CPU's attention kernels do not serve this model in {model.dtype} with blocks of {config.block_size} "
            "tokens, and only they have a KV cache in u8; choose --kv-dtype auto."
        )
    # A user who asks for the reference wants none of our kernels: one of them may crash the process.
    sampler = Sampler(model.device, kernel=False if config.attention == "reference" else None)
    return Execution(model, attention, sampler, config.cuda_graphs)


def _attention_of(config: EngineConfig, model: Model, kv_dtype: torch.dtype | None) -> AttentionBackend:
    """The backend of a model: if its layers are on devices of different kinds, the reference, which serves all."""
    if not model.layers or not model.is_causal:  # nothing calls it, or no kernel looks ahead
        return ReferenceAttention(kv_dtype, is_causal=model.is_causal)
    if not all(layer.value_dim for layer in model.layers):
        if config.attention not in ("auto", ReferenceAttention.name):
            raise ConfigError(
                f"The attention backend {config.attention} does not serve the sparse attention of this model; choose "
                "auto or reference."
            )
        return ReferenceAttention(kv_dtype)
    sizes = model.layers, config.block_size, model.dtype, kv_dtype
    backends = {
        device: select_attention(config.attention, device, *sizes, config.deterministic)
        for device in dict.fromkeys(model.layer_devices)
    }
    if len({backend.name for backend in backends.values()}) > 1:
        return ReferenceAttention(kv_dtype)
    return PerDeviceAttention(backends) if len(backends) > 1 else next(iter(backends.values()))


def _step_down(best: Execution, config: EngineConfig) -> Execution:
    """The first that agrees, with the reasons why it is not the best one."""
    from cbatch.engine.kernel_checks.sampling import check_sampling

    device, problem = best.model.device, triton_problem(best.model.device)
    chosen, reason, sentences = best, problem or "", []
    if best.sampler.uses_kernel:  # before the steps that are captured with it
        wrong = "" if problem else _first_problem([check_sampling(best.sampler, best.model.vocab_size)])
        if problem or wrong:
            best.sampler.disable_kernel()
        if wrong:
            sentences.append(f"Tokens are sampled by operations of torch on {device}: {wrong}")
    if best.attention.name == "triton":
        chosen, reason = (_by_torch(best), problem) if problem else _first_that_agrees(best, config.block_size)
        if reason and config.attention != "auto":
            raise ConfigError(f"The attention backend {config.attention} cannot be used on {device}: {reason}")
    elif not problem:
        reason = f"The Triton kernels do not serve this model in {best.model.dtype}."
    if reason and config.attention == "auto":
        sentences.insert(0, f"{_consequence(best, chosen)} on {device}: {reason}")
    return replace(chosen, fallback=" ".join(sentences))


def _consequence(best: Execution, chosen: Execution) -> str:
    from cbatch.model.cuda import CudaModel

    if chosen.attention.name == "reference":
        return "Attention runs by operations of torch, which is slow,"
    parts = []
    if isinstance(chosen.model, CudaModel) and chosen.model is not best.model:
        if not chosen.model.ops.without:
            return "The layers run by operations of torch"
        parts = [f"Operations of torch take the place of {_listed(chosen.model.ops.without)}"]
    if best.graphs and not chosen.graphs:
        parts.append("steps run without CUDA graphs" if parts else "Steps run without CUDA graphs")
    return ", and ".join(parts)


def _listed(kernels: Iterable[str]) -> str:
    names = sorted(kernels)
    return f"the kernel{'s' * (len(names) > 1)} {' and '.join(names)}"


def _first_that_agrees(best: Execution, block_size: int) -> tuple[Execution, str]:
    """The first that agrees, and why the one before it does not; that is empty for the best one."""
    from cbatch.engine.kernel_checks.all_checks import ModelChecks, without_kernels
    from cbatch.model.cuda import CudaModel

    checks = ModelChecks(best, block_size)
    if reason := _first_problem(checks.attention_kernels()):
        return _by_torch(best), reason
    chosen, reasons = best, list[str]()
    while failed := next((check for check in checks.layers() if not check.agrees), None):
        reasons.append(failed.reason)
        if not failed.kernel:
            if still_wrong := _first_problem([checks.step_by_torch()]):
                return _by_torch(best), still_wrong
            return replace(best, model=without_kernels(best.model, heads_first=True), graphs=False), failed.reason
        assert isinstance(chosen.model, CudaModel)
        ops = replace(chosen.model.ops, without=chosen.model.ops.without | {failed.kernel})
        chosen = replace(chosen, model=chosen.model.with_ops(ops), graphs=chosen.graphs and not ops.wait)
        checks = ModelChecks(chosen, block_size)
    if chosen.graphs and (reason := _first_problem(checks.captured_steps())):
        reasons.append(reason)
        chosen = replace(chosen, graphs=False)
    return chosen, " ".join(reasons)


def _by_torch(best: Execution) -> Execution:
    from cbatch.engine.kernel_checks.all_checks import without_kernels

    attention = ReferenceAttention(best.attention.kv_dtype)
    return replace(best, model=without_kernels(best.model), attention=attention, graphs=False)


def _first_problem(checks: Iterable[KernelCheck]) -> str:
    return next((check.reason for check in checks if not check.agrees), "")
