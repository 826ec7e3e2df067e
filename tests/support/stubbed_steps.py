"""Steps of a model on a stub driver: everything that the host does for a GPU, and nothing that the GPU does.

For processes that do not interpret kernels. `TRITON_INTERPRET=0 python -m tests.support.stubbed_steps` runs steps of
all sizes after a warm-up, and prints why kernels were compiled then.
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from cbatch.attention.triton import TritonAttention
from cbatch.base.quantization import Quantization
from cbatch.engine.cuda_graphs import GraphSizes, StepGraphs, StepParts
from cbatch.model.cuda import CudaModel
from cbatch.model.families import read_program
from cbatch.runtime import transfer
from cbatch.runtime.batch import RaggedBatch
from cbatch.runtime.kv_cache import KVCache
from cbatch.runtime.state_pool import StatePool, StepStates
from cbatch.sample.sampler import PARAM_WORDS, Sampler
from cbatch.sample.structured.token_bitmask import bitmask_size
from cbatch.schedule.limits import StepLimits
from tests.support.triton_driver import stub_driver

BLOCK_SIZE = 16
MAX_SEQS = 512
CPU = torch.device("cpu")
TINY: dict[str, Any] = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "vocab_size": 320,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": False,
}
CONFIGS: dict[str, dict[str, Any]] = {
    "llama": TINY | {"model_type": "llama"},
    "llama, int4": TINY | {"model_type": "llama", "quantize": "int4", "tie_word_embeddings": True},
    "mistral, window": TINY | {"model_type": "mistral", "sliding_window": 700},
    "qwen3.5, recurrent": TINY
    | {
        "model_type": "qwen3_5_text",
        "num_hidden_layers": 2,
        "layer_types": ["linear_attention", "full_attention"],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 24,
        "linear_conv_kernel_dim": 4,
    },
    "qwen3 moe, 6 of 16 experts": TINY
    | {"model_type": "qwen3_moe", "num_experts": 16, "num_experts_per_tok": 6, "moe_intermediate_size": 32},
    "qwen3, odd sizes": TINY
    | {"model_type": "qwen3", "num_attention_heads": 6, "head_dim": 10, "intermediate_size": 70, "vocab_size": 333},
}


class StubbedSteps:
    """A model without weights, its cache, and steps like those that an engine launches."""

    def __init__(self, config: Mapping[str, Any], num_blocks: int, dtype: torch.dtype = torch.bfloat16) -> None:
        quantize = Quantization(config["quantize"]) if "quantize" in config else None
        config = {key: value for key, value in config.items() if key != "quantize"}
        tensors = {name: torch.zeros(shape) for name, shape in read_program(config).shapes.items()}
        self.model = CudaModel(config, tensors, dtype, CPU, quantize=quantize)
        self.attention = TritonAttention(CPU)
        self.sampler = Sampler(CPU, kernel=True)
        shapes = [self.attention.block_shapes(layer, BLOCK_SIZE, dtype) for layer in self.model.layers]
        self.kv_cache = KVCache(shapes, num_blocks, BLOCK_SIZE, dtype, CPU)
        self.state_pool = StatePool(self.model.states, MAX_SEQS, CPU) if self.model.states else None

    def batch(self, starts: Sequence[int], stops: Sequence[int]) -> RaggedBatch:
        """Tokens `starts` to `stops` of sequences, which share the blocks of the cache; all but the longest chunk have
        reached their last token.
        """
        lengths = np.array(stops) - np.array(starts)
        sequence = np.repeat(np.arange(len(stops)), lengths)
        positions = np.arange(lengths.sum()) + (np.array(stops) - lengths.cumsum())[sequence]
        width = -(-max(stops) // BLOCK_SIZE)
        tables = (np.arange(width) + np.arange(len(stops))[:, None]).astype(np.int32) % len(self.kv_cache.keys[0])
        slots = tables[sequence, positions // BLOCK_SIZE] * np.int64(BLOCK_SIZE) + positions % BLOCK_SIZE
        rows = lengths.cumsum() - 1
        if lengths.max() > 1:
            rows = np.delete(rows, lengths.argmax())
        ids, words = np.zeros_like(positions), np.ones((len(rows), PARAM_WORDS), np.int32)
        states = None
        if self.state_pool is not None:
            order = np.arange(len(stops))
            states = StepStates(self.state_pool, order, lengths, np.where(order % 3 == 0, MAX_SEQS - 1 - order, -1))
        return RaggedBatch(
            ids, positions, slots, rows, tables, list(starts), list(stops), CPU, sampling_params=lambda: words,
            states=states,
        )  # fmt: skip

    def run(self, batch: RaggedBatch) -> None:
        """A step that is not captured, and sampling."""
        logits = self.model.forward(batch, self.kv_cache, self.attention).values
        if len(logits):
            self._sample(logits, batch)

    def _sample(self, logits: Tensor, batch: RaggedBatch) -> None:
        words = batch.sampling_params() if batch.sampling_params is not None else None
        assert words is not None
        self.sampler.sample_on_device(logits, packed_to_device([words], CPU)[0])

    def capture(self, max_seqs: int, max_batch_tokens: int) -> StepGraphs:
        """All graphs of an engine. To replay one does nothing."""
        parts = StepParts(self.model, self.attention, self.kv_cache, self.sampler, self.state_pool)
        sizes = GraphSizes.of(StepLimits(max_seqs, max_batch_tokens, graphs=True))
        return StepGraphs(parts, sizes, lambda run: lambda: None)

    def replay(self, graphs: StepGraphs, batch: RaggedBatch) -> None:
        """A captured step, and sampling."""
        logits = graphs.forward(batch)
        assert logits is not None, "there is no graph for this step"
        if logits.sampled is None and len(logits.values):
            self._sample(logits.values, batch)

    def sample_masked(self, rows: int) -> None:
        """With masks, and with results written to places that are no multiples of 16."""
        vocabulary = self.model.vocab_size
        words, sets = packed_to_device(
            [np.zeros((rows, PARAM_WORDS), np.int32), np.zeros((rows % 7 + 1, bitmask_size(vocabulary)), np.int32)], CPU
        )
        tokens, largest = torch.empty(rows + 1, dtype=torch.int64)[1:], torch.empty(rows + 1)[1:]
        self.sampler.sample_on_device(torch.empty(rows, vocabulary), words, tokens, largest, sets[rows % 2 :])


@contextmanager
def host_work_only() -> Iterator[None]:
    """Within the block, matrix products leave their results uninitialized, because a CPU would take long for them; and
    arrays are packed on their way to the CPU, as for a GPU, so that their addresses are aligned as there.
    """
    with ExitStack() as stack:
        for function, name, other in (
            (transfer.to_device, "to_device", packed_to_device),
            (torch.nn.functional.linear, "linear", skipped_linear),
            (torch.mm, "mm", skipped_mm),
        ):
            for holder in [module for module in sys.modules.values() if vars(module).get(name) is function]:
                stack.enter_context(patch.object(holder, name, other))
        yield


def packed_to_device(arrays: Sequence[NDArray[Any]], device: torch.device) -> list[Tensor]:
    return transfer.unpack(transfer.pack(arrays, arrays, pin=False).to(device), arrays)


def skipped_linear(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    return rows.new_empty(rows.shape[0], weight.shape[0])


def skipped_mm(left: Tensor, right: Tensor, *, out: Tensor | None = None) -> Tensor:
    return left.new_empty(left.shape[0], right.shape[1]) if out is None else out


def compiled_late(config: Mapping[str, Any], decode_rows: Sequence[int], chunks: Sequence[int]) -> list[str]:
    """Why kernels are compiled in steps that follow a decode step, a mixed one and the captures of an engine's start;
    see `StubDriver.changes`.

    decode_rows: sizes of decode steps; chunks: tokens of the longest chunk of mixed steps
    """
    steps = StubbedSteps(config, num_blocks=12000)
    with stub_driver() as stub, host_work_only(), torch.inference_mode():
        steps.run(steps.batch([1999] * 5, [2000] * 5))
        steps.run(steps.batch([0, 1999, 7], [40, 2000, 12]))
        graphs = steps.capture(MAX_SEQS, 1024)
        begin = len(stub.compilations)
        for size in decode_rows:
            lengths = [1 + row * 37 % 1100 for row in range(size)]
            batch = steps.batch([length - 1 for length in lengths], lengths)
            steps.run(batch)
            steps.sample_masked(size)
            steps.replay(graphs, batch)
        for size in chunks:
            rows = [size * 7 % 900] * (size % 20)
            batch = steps.batch([size % 3 * 100, *rows], [size % 3 * 100 + size, *(row + 1 for row in rows)])
            steps.run(batch)
            steps.replay(graphs, batch)
        return stub.changes(begin)


def attention_compiled_late(dim: int, sizes: Sequence[int]) -> list[str]:
    """The same of attention alone, as a model of transformers calls it: with queries, keys and values [heads, T, dim].

    sizes: of decode steps, and tokens of the chunk of mixed steps
    """
    steps = StubbedSteps(CONFIGS["llama"] | {"head_dim": dim}, num_blocks=2000)
    attention, keys, values = steps.attention, steps.kv_cache.keys[0], steps.kv_cache.values[0]

    def attend(starts: Sequence[int], stops: Sequence[int]) -> None:
        batch = steps.batch(starts, stops)
        metadata, tokens = attention.prepare(batch, BLOCK_SIZE), sum(stops) - sum(starts)
        query, new = (torch.empty(heads, tokens, dim, dtype=keys.dtype).transpose(0, 1) for heads in (4, 2))
        attention.store_kv(keys, values, new, new, metadata)
        attention.attend(query, keys, values, metadata, scale=1.0)

    with stub_driver() as stub, torch.inference_mode():
        attend([1999] * 5, [2000] * 5)
        attend([0, 1999, 7], [40, 2000, 12])
        begin = len(stub.compilations)
        for size in sizes:
            attend([99] * size, [100] * size)
            attend([0, 1999, 7], [size, 2000, 12])
        return stub.changes(begin)


class CountedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Counts operations of torch that launch something: neither views nor new tensors."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.launches: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view and "empty" not in func.name():
            self.launches[func.name().removeprefix("aten::")] += 1
        return func(*args, **kwargs or {})


def launches_of_a_layer(config: Mapping[str, Any], starts: Sequence[int], stops: Sequence[int]) -> dict[str, int]:
    """The launches of a step that come more often if the model has one layer more: kernels and operations of torch."""
    found = []
    for layers in (1, 2):
        steps = StubbedSteps({**config, "num_hidden_layers": layers}, num_blocks=2000)
        with stub_driver() as stub, torch.inference_mode(), CountedOperations() as counted:
            steps.model.forward(steps.batch(starts, stops), steps.kv_cache, steps.attention)
        found.append(stub.launches + counted.launches)
    return dict(found[1] - found[0])


if __name__ == "__main__":
    torch.set_num_threads(1)
    some = [size for size in range(1, 513) if size < 20 or size % 16 in (0, 1, 15)]
    found = {
        name: compiled_late(config, range(1, 513) if name == "llama" else some, some)
        for name, config in CONFIGS.items()
    }
    found |= {f"transformers, heads of {dim}": attention_compiled_late(dim, range(1, 49)) for dim in (64, 72)}
    print(json.dumps(found, indent=1))
