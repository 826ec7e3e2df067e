"""Runs a model on ragged batches over the paged KV cache."""

from __future__ import annotations

from cbatch.engine.attention.base import AttentionBackend, CapturableAttention
from cbatch.engine.base.errors import EngineError
from cbatch.engine.execution.cuda_graphs import DecodeGraphs
from cbatch.engine.models.base import CapturableModel, Model
from cbatch.engine.runtime.batch import Logits, RaggedBatch
from cbatch.engine.runtime.device import is_nvidia
from cbatch.engine.runtime.kv_cache import KVCache


def graph_parts(
    model: Model, attention: AttentionBackend, wanted: bool
) -> tuple[CapturableModel, CapturableAttention] | None:
    """The model and the attention backend, if decode steps are to be captured as CUDA graphs."""
    if not wanted or not is_nvidia(model.device) or model.capturable is None or attention.capturable is None:
        return None
    return model.capturable, attention.capturable


class ModelRunner:
    """Owns a model, its KV cache and its CUDA graphs until it is closed. Knows nothing of requests."""

    def __init__(
        self, model: Model, attention: AttentionBackend, num_blocks: int, block_size: int, max_graph_rows: int = 0
    ) -> None:
        """max_graph_rows: capture decode steps of up to this many sequences, if model and attention allow it"""
        self.attention = attention
        self.num_blocks = num_blocks
        shapes = [attention.block_shapes(layer, block_size, model.dtype) for layer in model.layers]
        kv_cache = KVCache(shapes, num_blocks, block_size, model.dtype, model.device)
        self._open: tuple[Model, KVCache] | None = model, kv_cache
        self._graphs: DecodeGraphs | None = None
        if parts := graph_parts(model, attention, max_graph_rows > 0):
            self._graphs = DecodeGraphs(*parts, kv_cache, max_graph_rows)

    @property
    def model(self) -> Model:
        return self.check_open()[0]

    @property
    def kv_cache(self) -> KVCache:
        return self.check_open()[1]

    @property
    def is_closed(self) -> bool:
        return self._open is None

    def check_open(self) -> tuple[Model, KVCache]:
        """The model and the cache. Raises EngineError after `close`."""
        if self._open is None:
            raise EngineError("The engine is closed.")
        return self._open

    def forward(self, batch: RaggedBatch) -> Logits:
        """Logits [R, vocabulary] of the batch's `rows`; stores the keys and values of its tokens in the cache."""
        if self._graphs is not None and (logits := self._graphs.forward(batch)) is not None:
            return Logits(logits)
        return self.model.forward(batch, self.kv_cache, self.attention)

    def close(self) -> None:
        """Drops the model, the cache and the graphs; to use one of them afterwards raises EngineError."""
        self._graphs = self._open = None
