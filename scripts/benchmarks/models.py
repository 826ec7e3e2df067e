"""Models to measure with: random ones of real shapes, and one that costs nothing. Nothing has to be downloaded."""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cbatch.attention.base import AttentionBackend
from cbatch.base.params import SamplingParams
from cbatch.base.quantization import Quantization
from cbatch.kernels.formats import FP8, Integers
from cbatch.kernels.quantized_matrix import rounded_rows
from cbatch.model.base import LinearCost, Model
from cbatch.model.families import read_program
from cbatch.model.loader import LoadedModel
from cbatch.model.lora_files import Adapter
from cbatch.model.stored import Packing, Rows, StoredMatrix, StoredWeights
from cbatch.runtime.batch import Logits, RaggedBatch
from cbatch.runtime.kv_cache import KVCache, LayerShape
from cbatch.runtime.memory import MappedFiles
from cbatch.runtime.state_pool import StateShape
from scripts.benchmarks.shapes import Config


class RandomTensors(Mapping[str, Tensor]):
    """The weights of a model by name, each made when it is asked for, and always the same.

    Norms are near 1, and matrices keep the size of what goes through them.
    """

    def __init__(self, config: Config, device: torch.device, dtype: torch.dtype) -> None:
        self.shapes = read_program(config).shapes
        self.device = device
        self.dtype = dtype

    def __getitem__(self, name: str) -> Tensor:
        shape = self.shapes[name]
        generator = torch.Generator(self.device).manual_seed(zlib.crc32(name.encode()))
        tensor = torch.randn(shape, generator=generator, device=self.device, dtype=self.dtype)
        if len(shape) == 1:
            return 1 + tensor / 10 if name.endswith("norm.weight") else tensor / 10
        return tensor if "embed" in name else tensor * (1.5 / shape[1] ** 0.5)

    def __iter__(self) -> Iterator[str]:
        return iter(self.shapes)

    def __len__(self) -> int:
        return len(self.shapes)


class _Float8Matrix(StoredMatrix):
    """A matrix in FP8, with a scale for each row."""

    def __init__(self, tensors: Mapping[str, Tensor], name: str) -> None:
        self._tensors, self._name = tensors, name
        self.shape = tuple(tensors[name].shape)
        self.rows = self.shape[0]

    @property
    def packing(self) -> Packing:
        return Packing(FP8, -(-self.shape[-1] // 32) * 32)

    def kept(self, rows: Rows, format: int) -> Integers | None:
        return self._codes(rows) if format == FP8 else None

    def values(self, rows: Rows) -> Tensor:
        return self._codes(rows).values(FP8, self.packing.group)

    def _codes(self, rows: Rows) -> Integers:
        codes, scales = rounded_rows(self._tensors[self._name])
        return Integers(codes.view(torch.uint8)[rows], scales[rows])


class _Numbers(_Float8Matrix):
    """A weight that stays numbers."""

    has_rows = False

    @property
    def whole(self) -> Tensor:
        return self._tensors[self._name]


class _InMemory(MappedFiles):
    num_bytes = 0


def in_float8(tensors: Mapping[str, Tensor]) -> StoredWeights:
    """Weights of which the matrices of layers are FP8."""
    kinds = {name: _Float8Matrix if name.endswith("_proj.weight") else _Numbers for name in tensors}
    return StoredWeights({name: kind(tensors, name) for name, kind in kinds.items()}, _InMemory(()))


def random_tensors(
    config: Config, device: torch.device, dtype: torch.dtype, quantize: Quantization | None
) -> Mapping[str, Tensor]:
    """Weights of a model; in FP8 if those of the files are to be kept."""
    tensors = RandomTensors(config, device, dtype)
    return in_float8(tensors) if quantize is not None and quantize.keeps_stored else tensors


def make_network(config: Config, tensors: Mapping[str, Tensor], dtype: torch.dtype, device: torch.device) -> Any:
    """The transformers model with these weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    kind = config["model_type"]
    settings = {key: value for key, value in config.items() if key not in ("model_type", "dtype", "architectures")}
    with device:
        network = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **settings), dtype=dtype)
    with torch.no_grad():
        for name, parameter in network.named_parameters():
            parameter.copy_(tensors[name])
    return network.eval().requires_grad_(False)


def load_random(
    name: str, config: Config, device: torch.device, *, fast_path: bool = True, quantize: Quantization | None = None
) -> LoadedModel:
    """A random bfloat16 model as an engine takes it.

    fast_path: with the kernels of the device; without, transformers computes it
    quantize:  how the fast path keeps its matrices; None: in bfloat16; stored: they are FP8
    """
    tensors = random_tensors(config, device, torch.bfloat16, quantize)
    return LoadedModel(
        name=name,
        make_network=lambda: make_network(config, tensors, torch.bfloat16, device),
        tokenizer=None,
        defaults=SamplingParams(),
        eos_ids=frozenset(),
        fast_model=_make_fast_model(config, tensors, device, quantize) if fast_path else None,
    )


def _make_fast_model(
    config: Config, tensors: Mapping[str, Tensor], device: torch.device, quantize: Quantization | None
) -> Model:
    if device.type == "cuda":
        from cbatch.model.cuda import CudaModel  # which needs Triton

        return CudaModel(config, tensors, torch.bfloat16, device, quantize=quantize)
    from cbatch.model.cpu import CpuModel  # which needs numba

    return CpuModel(config, tensors, torch.bfloat16, quantize=quantize)


class FreeModel:
    """A model that costs nothing: it says the same logits for every token, and reads and stores nothing."""

    def __init__(self, vocab_size: int, max_model_len: int, likeliest: int = 0) -> None:
        self.name = self.kind = "free"
        self.dtype, self.device = torch.float32, torch.device("cpu")
        self.vocab_size, self.max_model_len = vocab_size, max_model_len
        self.short_context: int | None = None
        self.layers = [LayerShape(1, 1, 1)]
        self.windows: list[int | None] = [None]
        self.layer_devices = [self.device]
        self.num_parameters = self.weight_bytes = 0
        self.linear_cost = LinearCost(0, 0.0, 0)
        self.has_own_threads, self.batch_invariant, self.capturable = False, False, None
        self.states: list[StateShape] = []
        self.state_devices: list[torch.device] = []
        self.chunk_multiple, self.generates, self.is_causal = 1, True, True
        self._logits = torch.zeros(1, vocab_size)
        self._logits[0, likeliest] = 1

    def forward(self, batch: RaggedBatch, pool: KVCache, attention: AttentionBackend) -> Logits:
        return Logits(self._logits.expand(len(batch.rows), -1))

    def with_adapters(self, adapters: Sequence[Adapter]) -> FreeModel:
        return self

    def loaded(self, eos_ids: frozenset[int] = frozenset()) -> LoadedModel:
        return LoadedModel("free", lambda: None, None, SamplingParams(), eos_ids, fast_model=self)
