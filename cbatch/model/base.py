"""The interface between the engine and a model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from cbatch.attention.base import AttentionBackend
from cbatch.kernels.operands import AdapterRows, Recurrence
from cbatch.model.lora_files import Adapter
from cbatch.runtime.batch import Logits, PooledRows, RaggedBatch
from cbatch.runtime.kv_cache import KVCache, LayerShape
from cbatch.runtime.state_pool import StateShape

ALL_EXPERTS_READ = "All experts are assumed to be read in every step, as they are if many requests run at once."


@dataclass(frozen=True, slots=True)
class LinearCost:
    """Weights that a step reads and multiplies, for estimates of the best speed that a device allows.

    weight_bytes:    of the matrices that every step reads
    parameters:      that every token is multiplied with, without those of the head
    head_parameters: those of the output head, with which only tokens that have an output are multiplied
    assumed:         sentences on what the model does not tell
    """

    weight_bytes: int
    parameters: float
    head_parameters: int
    assumed: tuple[str, ...] = ()


AddAdapters = Callable[[Any, Tensor, Tensor], None]
"""Adds what adapters add to a linear of the program with source [T, depth] to their product, [T, columns]."""


class DeviceImages(NamedTuple):
    """`ImageRows` on the device."""

    places: Tensor
    values: Tensor
    positions: Tensor | None


class DeviceInputs(NamedTuple):
    """A step's inputs on the device (see `RaggedBatch`): [T] integers each, and where its layers keep keys and values.

    A token with a negative slot is not stored in the cache.

    metadata:   what `attention.prepare` returned for the step
    recurrence: where the step's chunks have the states of recurrent layers; None for a model without such layers
    states:     each of these states [slots, *shape]
    adapters:   None if no token of the step has one
    images:     None if the step has none; its places are on the device
    """

    input_ids: Tensor
    position_ids: Tensor
    slot_mapping: Tensor
    kv_cache: KVCache
    attention: AttentionBackend
    metadata: Any
    recurrence: Recurrence | None = None
    states: Sequence[Tensor] = ()
    adapters: AddAdapters | None = None
    images: DeviceImages | None = None


class HiddenStates(NamedTuple):
    """The output of a model's last layer for T tokens, before the final norm.

    residual: [T, hidden size] float32
    added:    [T, hidden size] what the head adds to it, if the last layer leaves that to the head
    """

    residual: Tensor
    added: Tensor


class CapturableModel(Protocol):
    """A model whose steps can be captured as CUDA graphs.

    Neither part of a step waits for the device. The host contributes only the shapes of tensors, so a captured step is
    right for other numbers in the same tensors. Before it is captured, it must have run once with the same shapes, so
    that its kernels are compiled.
    """

    device: torch.device
    vocab_size: int
    max_model_len: int

    def new_hidden_states(self, tokens: int) -> HiddenStates:
        """Uninitialized tensors for so many tokens."""

    def run_layers(self, inputs: DeviceInputs, out: HiddenStates | None = None) -> HiddenStates:
        """The first part of a step: all layers, for all tokens; the result is in `out` if it is given."""

    def run_head(self, hidden: HiddenStates, rows: Tensor, out: Tensor | None = None) -> Tensor:
        """The second part: logits [R, vocabulary] float32 of the tokens `rows` [R], in `out` if it is given."""

    def pool(self, hidden: HiddenStates, pooled: PooledRows | None) -> Tensor | None:
        """Sums of hidden states after the last norm (`PooledRows.sums`); None if none are wanted."""

    def adding(self, rows: AdapterRows) -> AddAdapters | None:
        """Adds its adapters to the tokens of a step; None if it has none that are added in a captured one."""


class Model(Protocol):
    """A causal language model that runs ragged batches over a paged cache.

    name:            its class in transformers
    kind:            the `model_type` of its config
    layers:          shape of what each attention call of a step stores, in the order of the calls
    windows:         how many tokens back each of them sees, including the token itself; None for all
    layer_devices:   where each of them computes, and has its keys and values
    device:          where a step's tokens go in, and its logits come out
    max_model_len:   longest sequence, prompt and output, in tokens
    states:          what its recurrent layers keep for each sequence
    state_devices:   where each of the states is
    chunk_multiple:  tokens that its recurrent layers take together, counted from the beginning of a sequence
    short_context:   sequences that may become longer than this are encoded in another way: `max_model_len` is added to
                     their position ids. None if all are encoded alike
    generates:       whether it continues texts: not if its files hold no output head, or if tokens see later ones
    is_causal:       whether tokens see earlier ones only; if not, a step must have all tokens of a sequence
    has_own_threads: whether it computes on threads that are not torch's
    batch_invariant: whether a token has the same bits whatever else is in its step, and however its sequence was cut,
                     if attention has so, too
    num_parameters, weight_bytes: of all weights in memory
    """

    name: str
    kind: str
    dtype: torch.dtype
    device: torch.device
    vocab_size: int
    max_model_len: int
    short_context: int | None
    layers: list[LayerShape]
    windows: list[int | None]
    layer_devices: list[torch.device]
    states: list[StateShape]
    state_devices: list[torch.device]
    chunk_multiple: int
    generates: bool
    is_causal: bool
    has_own_threads: bool
    num_parameters: int
    weight_bytes: int

    @property
    def batch_invariant(self) -> bool: ...

    @property
    def linear_cost(self) -> LinearCost: ...

    @property
    def capturable(self) -> CapturableModel | None:
        """The parts of its steps, if these can be captured as CUDA graphs; mostly the model itself."""

    def with_adapters(self, adapters: Sequence[Adapter]) -> Model:
        """The same model with the same weights, to which these adapters add what a batch says.

        Raises ModelError for an adapter that does not fit.
        """

    def forward(self, batch: RaggedBatch, kv_cache: KVCache, attention: AttentionBackend) -> Logits:
        """Logits [R, vocabulary] of the wanted rows, and sums of hidden states after the last norm, if any are wanted.

        A torch model enters inference mode by itself.
        """
