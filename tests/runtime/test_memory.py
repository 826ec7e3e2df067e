"""Memory of a device: what is free, what a step takes, and that a closed engine frees everything."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from cbatch.api import Engine
from cbatch.base.config import EngineConfig
from cbatch.base.errors import EngineError, ModelError
from cbatch.base.params import SamplingParams
from cbatch.model.cpu import CpuModel
from cbatch.runtime.memory import (
    clear_frames,
    device_memory,
    drop_mapped_pages,
    is_out_of_memory,
    kernel_too_large,
    release_memory,
)
from tests.support.tiny_models import fast, loaded, make_network, no_collector

MIB = 2**20
FEW = SamplingParams(max_tokens=4, ignore_eos=True)
FAST = {"hidden_size": 64, "head_dim": 16}


@pytest.mark.parametrize("path", ["transformers", "fast"])
def test_a_closed_engine_holds_neither_weights_nor_cache(path: str, model_folder: Path) -> None:
    """Guards a device that is needed for something else while the closed engine is still referenced."""
    with no_collector():
        engine = Engine(
            str(model_folder), device="cpu", kv_blocks=40, attention="auto" if path == "fast" else "reference"
        )
        assert isinstance(engine.model, CpuModel) == (path == "fast")
        engine.generate([[1, 2, 3]], FEW)
        kv_cache = engine.core.runner.kv_cache
        held = [weakref.ref(one) for one in (*kv_cache.keys, kv_cache, engine.model)]
        del kv_cache
        engine.close()
        assert [one() for one in held] == [None] * len(held)
    assert engine.stats().num_steps > 0 and engine.limits.num_blocks == 40 and engine.loaded.eos_ids is not None


@pytest.mark.parametrize("path", ["transformers", "fast"])
def test_a_passed_model_stays_with_its_owner(path: str) -> None:
    """Guards several engines on one model: each frees its cache when it is closed, and the model stays."""
    network = make_network("llama", **FAST)
    given = fast(network) if path == "fast" else loaded(network)
    config = EngineConfig(device="cpu", kv_blocks=40)
    with no_collector():
        with Engine(config, loaded=given) as first:
            expected = first.generate([1, 2, 3], FEW).token_ids
            cache = weakref.ref(first.core.runner.kv_cache.keys[0])
        assert cache() is None
    with Engine(config, loaded=given) as second:
        assert second.generate([1, 2, 3], FEW).token_ids == expected
        assert isinstance(second.model, CpuModel) == (path == "fast")


@pytest.mark.parametrize(
    "use",
    [
        lambda engine: engine.generate([1, 2], FEW),
        lambda engine: engine.stream([1, 2], FEW),
        lambda engine: engine.score([1, 2]),
        lambda engine: engine.model,
        lambda engine: engine.loaded.network,
    ],
    ids=["generate", "stream", "score", "model", "network"],
)
@pytest.mark.parametrize("was_used", [True, False])
def test_using_a_closed_shared_engine_is_an_error(use: Callable[[Engine], Any], was_used: bool) -> None:
    """Guards the same for programs, whether the engine's thread was ever started or not."""
    engine = Engine(device="cpu", kv_blocks=40, loaded=loaded(make_network("llama")))
    if was_used:
        engine.generate([1, 2], FEW)
    engine.close()
    engine.close()
    with pytest.raises(EngineError, match=r"The engine is closed"):
        use(engine)


def test_a_gpu_is_asked_in_the_right_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the figures of a GPU: memory cached by torch counts as free, and a peak excludes what stays."""
    state = {"kept": 300, "allocated": 100, "peak": 900}

    def reset(device: torch.device) -> None:
        state["peak"] = state["allocated"]

    def step() -> None:
        state.update(allocated=150, peak=650)

    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: state.update(kept=0))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (1000 - state["kept"], 2000))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", reset)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: state["peak"])
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: state["allocated"])
    memory = device_memory(torch.device("cuda:1"))
    assert (memory.name, memory.share, memory.free()) == ("cuda:1", "90%", 1000)
    assert memory.measure_peak is not None and memory.measure_peak(step) == 500
    assert device_memory(torch.device("cpu")).measure_peak is None


def test_an_intel_gpu_may_not_tell_what_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards Intel GPUs whose driver has no figure for free memory: what torch has not taken counts as free."""

    def refuse(device: torch.device) -> tuple[int, int]:
        raise RuntimeError("The device does not support querying the available free memory.")

    monkeypatch.setattr(torch.xpu, "empty_cache", lambda: None)
    monkeypatch.setattr(torch.xpu, "mem_get_info", lambda device: (700, 1000))
    memory = device_memory(torch.device("xpu:0"))
    assert (memory.share, memory.free()) == ("90%", 700)
    monkeypatch.setattr(torch.xpu, "mem_get_info", refuse)
    monkeypatch.setattr(torch.xpu, "get_device_properties", lambda device: SimpleNamespace(total_memory=1000))
    monkeypatch.setattr(torch.xpu, "memory_reserved", lambda device: 100)
    assert memory.free() == 900


def test_an_apple_gpu_shares_the_memory_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a Mac against swapping: neither the GPU's limit nor the host's free memory is exceeded."""
    emptied = []
    monkeypatch.setattr(torch.mps, "empty_cache", lambda: emptied.append(True))
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 12_000)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 4_000)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=9_000))
    memory = device_memory(torch.device("mps:0"))
    assert (memory.name, memory.share, memory.free(), memory.measure_peak) == ("mps:0", "25%", 8_000, None)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=5_000))
    assert memory.free() == 5_000
    release_memory(torch.device("mps:0"))
    assert len(emptied) == 3


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB."), True),
        (MemoryError(), True),
        (RuntimeError("CUDA error: out of memory"), True),
        (RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"), True),
        (RuntimeError("Triton Error [CUDA]: out of memory"), True),
        (RuntimeError("[enforce fail at alloc_cpu.cpp:127] DefaultCPUAllocator: can't allocate memory"), True),
        (RuntimeError("HIP error: out of memory"), True),
        (RuntimeError("level_zero backend failed with error: 39 (UR_RESULT_ERROR_OUT_OF_DEVICE_MEMORY)"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9.07 GB, max allowed: 9.07 GB)."), True),
        (RuntimeError("Triton Error [CUDA]: too many resources requested for launch"), False),
        (RuntimeError("CUDA error: an illegal memory access was encountered"), False),
        (ValueError("the list of excuses is out of memory"), False),
    ],
)
def test_which_errors_mean_out_of_memory(error: Exception, expected: bool) -> None:
    """Guards steps against being made smaller for other errors, and the reverse."""
    assert is_out_of_memory(error) == expected


def test_a_kernel_that_does_not_fit_is_not_out_of_memory() -> None:
    """Guards steps against being made smaller again and again for shared memory, of which each takes as much.

    That holds too if the kernel was tried because memory had run out.
    """
    errors = pytest.importorskip("triton.runtime.errors", reason="the error is one of Triton")
    error = errors.OutOfResources(131072, 101376, "shared memory")
    error.__context__ = torch.OutOfMemoryError("CUDA out of memory")
    assert not is_out_of_memory(error) and is_out_of_memory(error.__context__)
    assert kernel_too_large(error) == (
        "a kernel needs 131072 of shared memory, and this GPU has 101376; "
        "--attention reference does without such kernels"
    )
    launch = RuntimeError("Triton Error [CUDA]: too many resources requested for launch")
    assert str(kernel_too_large(launch)).startswith("a kernel needs more registers than this GPU has; ")
    for other in (error.__context__, RuntimeError("out of resource"), ValueError("too many resources requested")):
        assert kernel_too_large(other) is None


def test_a_kept_error_keeps_no_tensors() -> None:
    """Guards the device's memory while the error of a failed engine is kept: its frames and those of its causes."""
    held: list[weakref.ref[torch.Tensor]] = []

    def forward() -> None:
        activations = torch.zeros(3)
        held.append(weakref.ref(activations))
        raise RuntimeError("device lost")

    def step() -> None:
        activations = torch.zeros(3)
        held.append(weakref.ref(activations))
        try:
            forward()
        finally:
            raise RuntimeError("cannot clean up")

    kept: Exception | None = None
    try:
        step()
    except RuntimeError as error:
        kept = error
    assert [one() is None for one in held] == [False, False] and kept is not None
    clear_frames(kept)
    assert [one() is None for one in held] == [True, True] and str(kept) == "cannot clean up"


def test_weights_that_do_not_fit_are_a_clear_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the first thing that fails on a small device; the other path, which takes no less, is not tried."""

    def full(*_: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20 GiB. GPU 0 has none.")

    monkeypatch.setattr("cbatch.model.ops.cpu_layout.CpuLayout.load", full)
    with pytest.raises(ModelError, match=r"its weights do not fit into the memory of cpu \(CUDA out of memory\)\."):
        Engine(device="cpu")


@pytest.mark.gpu
def test_a_gpu_gets_its_memory_back() -> None:
    """Guards a real GPU: a cache as large as fits beside a step, steps and graphs, and all memory freed in the end."""
    memory, free = device_memory(torch.device("cuda:0")), []
    for _ in range(3):
        engine = Engine(device="cuda", kv_cache_memory="100%")
        for _ in range(3):
            engine.generate([[1, 2, 3]] * 40, FEW)
        engine.close()
        free.append(memory.free())
    assert free[0] - free[2] < 64 * MIB, (
        "what the first engine left are libraries and kernels; the others leave nothing"
    )


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can be asked to drop the pages of a file")
def test_pages_of_a_mapped_file_are_dropped(tmp_path: Path) -> None:
    """Guards memory while weights are packed: what was read need not stay, and is the same when it is read again."""
    names = [tmp_path / name for name in ("read.bin", "linked.bin", "kept.bin")]
    for path in names[:1] + names[2:]:
        np.arange(2**20, dtype=np.int32).tofile(path)
    names[1].symlink_to(names[0])
    arrays = [np.memmap(path, np.int32, "c") for path in (names[0], names[2])]

    def resident() -> list[int]:
        maps = psutil.Process().memory_maps(grouped=True)
        return [next(one.rss for one in maps if one.path == str(path)) for path in (names[0], names[2])]

    totals = [array.sum() for array in arrays]
    assert resident() == [4 * MIB, 4 * MIB]
    drop_mapped_pages([names[1]])
    assert resident() == [0, 4 * MIB]
    assert [array.sum() for array in arrays] == totals
