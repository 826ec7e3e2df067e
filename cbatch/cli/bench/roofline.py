"""The machine, and the least time that its device needs for some work, from rates measured on it (the roofline model).

A run takes at least the longer of reading the weights and multiplying all tokens with them, plus reading the KV cache
(https://doi.org/10.1145/1498765.1498785). The bound is lower than it need be, because it ignores that prompts read
their context too, attention's own arithmetic, and everything that is not a matrix; docs/bench.md says more.
"""

from __future__ import annotations

import platform
import re
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from cbatch import __version__
from cbatch.api import Engine
from cbatch.base.units import parse_memory
from cbatch.cli.bench.workload import Workload
from cbatch.model.base import LinearCost
from cbatch.runtime.transfer import synchronize

ROWS_PER_STEP = 256
"""Output tokens that share one reading of the weights. A run's own batch size would make small batches look good."""

CPU_CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
"""Where Linux shows them. Tests put their own in place."""

COPY_BYTES = 2**28
ROUNDS = 5
ROUNDS_S = 0.4
"""Seconds after which no further round of a measurement starts."""

clock = time.perf_counter


def describe(engine: Engine) -> dict[str, Any]:
    """The machine, with the versions of what runs on it, and the model, as they stand in `--json`."""
    module, shown = torch.get_device_module(engine.device), engine.core.describe()
    parameters = shown["parameters"].replace(" million", " million parameters", 1)
    machine = {
        "device": module.get_device_name(engine.device) if hasattr(module, "get_device_name") else processor(),
        "threads": torch.get_num_threads(),
        "system": platform.platform(),
        "cbatch": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    model = f"{shown['model']}, {parameters}, {shown['dtype']}, attention {shown['attention']}"
    return {"machine": machine, "model": model}


def processor() -> str:
    """The name of the processor, if the system tells it."""
    with suppress(OSError):
        if found := re.search(r"^model name\s*:\s*(\S.*)$", Path("/proc/cpuinfo").read_text(), re.MULTILINE):
            return found[1].strip()
    return platform.processor() or platform.machine()


@dataclass(frozen=True, slots=True)
class DeviceRates:
    """Bytes read and written a second by a copy, and floating-point operations a second of a matrix product."""

    bytes_per_s: float
    flops_per_s: float


def measure_rates(device: torch.device, dtype: torch.dtype) -> DeviceRates:
    """Measures each rate as the best of several rounds, with as many threads as a run. Takes up to 768 MiB briefly.

    All numbers are random, and the matrices lie as a model's do. With equal ones few bits change from one operation to
    the next, a GPU stays below its power limit, and a product is faster by a tenth and more than in any run
    (https://www.thonking.ai/p/strangely-matrix-multiplications). A round on a GPU is long enough to reach that limit.
    """
    is_gpu = device.type != "cpu"
    drawn = torch.randint(256, (min(COPY_BYTES, 2**20),), dtype=torch.uint8, device=device)
    source = drawn.repeat(COPY_BYTES // len(drawn))  # a CPU takes seconds to draw all
    target = torch.empty_like(source)
    copy_s = best_time(lambda: target.copy_(source), device, 20 if is_gpu else 1)
    # Without instructions for bfloat16, products are computed in float32, by torch more slowly than those of float32.
    dtypes = {dtype} if is_gpu else {dtype, torch.float32}
    return DeviceRates(2 * len(source) / copy_s, max(_matrix_rate(device, each) for each in dtypes))


def _matrix_rate(device: torch.device, dtype: torch.dtype) -> float:
    size, repeats = (8192, 40) if device.type != "cpu" else (1024, 1)
    generator = torch.Generator(device).manual_seed(0)
    left, right = (torch.randn(size, size, generator=generator, device=device).to(dtype) for _ in range(2))
    product = torch.empty_like(left)
    with torch.inference_mode():
        return 2 * size**3 / best_time(lambda: torch.mm(left, right.t(), out=product), device, repeats)


def best_time(work: Callable[[], Any], device: torch.device, repeats: int) -> float:
    """Seconds of `work` in the best round, after a warm-up. Repeats within a round hide a GPU's launch overhead."""
    times: list[float] = []
    for _ in range(1 + ROUNDS):
        synchronize(device)
        start = clock()
        for _ in range(repeats):
            work()
        synchronize(device)
        times.append((clock() - start) / repeats)
        if len(times) > 1 and sum(times) * repeats > ROUNDS_S:
            break
    return max(min(times[1:]), 1e-9)


def cache_bytes(device: torch.device) -> int:
    """Bytes of the largest cache in front of the device's memory; 0 if they are not known."""
    if device.type != "cpu":
        return int(getattr(torch.get_device_module(device).get_device_properties(device), "L2_cache_size", 0))
    sizes = (path.read_text().strip() for path in CPU_CACHES.glob("index*/size"))  # such as 48K
    return max((parse_memory(f"{size}iB", 0) for size in sizes), default=0)


@dataclass(frozen=True, slots=True)
class ModelCost(LinearCost):
    """The cost of a model's step, with its KV cache.

    layers: for each attention layer, bytes of keys and values of a token, and its window in tokens (or None)
    """

    layers: tuple[tuple[int, int | None], ...] = ()

    @classmethod
    def of(cls, engine: Engine) -> ModelCost:
        model = engine.model
        numbers = [layer.heads * (layer.key_dim + layer.value_dim) for layer in model.layers]
        size, total = engine.limits.kv_bytes_per_token, sum(numbers)
        layers = tuple((size * number // total, window) for number, window in zip(numbers, model.windows, strict=True))
        return cls(**asdict(model.linear_cost), layers=layers)


@dataclass(frozen=True, slots=True)
class RooflineBound:
    """The least seconds of a run: reading the weights, multiplying with them meanwhile, reading the KV cache."""

    weights_s: float
    compute_s: float
    cache_s: float

    @property
    def seconds(self) -> float:
        return max(self.weights_s, self.compute_s) + self.cache_s

    def reached(self, elapsed_s: float) -> float:
        """The speed of a run as a share of the most that the bound allows; 1 is as fast as the device can be."""
        return self.seconds / elapsed_s if elapsed_s > 0 else 0.0


def roofline_bound(work: Workload, cost: ModelCost, rates: DeviceRates) -> RooflineBound:
    """The least time of the work. The j-th output token of a request, from 0, reads its prompt and j tokens."""
    tokens = work.prompt_tokens + work.output_tokens - len(work.prompts)  # nothing follows a request's last token
    operations = 2 * (cost.parameters * tokens + cost.head_parameters * work.output_tokens)
    requests = zip(work.prompts, work.output_lengths, strict=True)
    contexts = np.concatenate([len(prompt) + np.arange(length) for prompt, length in requests])
    cache_bytes = sum(
        layer_bytes * int((contexts if window is None else np.minimum(contexts, window)).sum())
        for layer_bytes, window in cost.layers
    )
    return RooflineBound(
        weights_s=work.output_tokens / ROWS_PER_STEP * cost.weight_bytes / rates.bytes_per_s,
        compute_s=operations / rates.flops_per_s,
        cache_s=cache_bytes / rates.bytes_per_s,
    )
