"""Runs any causal language model of transformers that calls its AttentionInterface on ragged batches.

One attention function is registered under the name `cbatch`. No mask function is registered under that name, so
transformers builds no masks. A probe learns once which tokens a layer may see, from the mask functions that the model
itself asks for (see `mask_patterns`).

Recurrent layers go on from the states in their slots (see `recurrent`).

Some models keep something else outside the keys and values seen here: sparse attention with an index of its own, or
position encodings that depend on the length of the whole text. They would run on a ragged batch and be silently wrong,
so `TransformersModel` refuses them: the probe looks at every call of the interface, and `self_check` compares small
ragged steps with the model's own forward.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from copy import copy
from dataclasses import replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary, WeakSet

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from cbatch.attention.base import AttentionBackend
from cbatch.base.errors import ModelError
from cbatch.model.base import LinearCost
from cbatch.model.hf.attention_calls import (
    AttentionCalls,
    AttentionProbe,
    attending,
    paged_attention,
    placeholder_mask,
)
from cbatch.model.hf.capture import CapturableNetwork
from cbatch.model.hf.hooks import accept_host_rows, input_device, parameters_once
from cbatch.model.hf.indexed import INDEXED_LAYERS, serve_indexers
from cbatch.model.hf.linear_cost import linear_cost_of
from cbatch.model.hf.mask_patterns import MaskPattern, probe_mask
from cbatch.model.hf.recurrent import StateLayout, recurring, serve_modules
from cbatch.model.hf.recurrent_modules import modules_with_conventions
from cbatch.model.lora.modules import ModuleAdapters
from cbatch.model.lora_files import Adapter
from cbatch.runtime.batch import Logits, RaggedBatch
from cbatch.runtime.device import has_bfloat16, samples_on
from cbatch.runtime.kv_cache import KVCache, LayerShape
from cbatch.runtime.state_pool import StateShape

ATTENTION_NAME = "cbatch"
PROBE_NAME = "cbatch_probe"
INDEXED_NAME = "cbatch_indexed"
"""Of models with an indexer, whose modules take masks apart before they reach the attention function."""

ATTENTION_LAYERS = {
    "full_attention": "full_attention",
    "sliding_attention": "sliding_attention",
    "chunked_attention": "chunked_attention",
    "indexed_attention": "full_attention",
    "hybrid": "full_attention",
    "hybrid_sliding": "sliding_attention",
}
"""Types of layers that attend over keys and values, and which of them a token sees."""
RECURRENT_LAYERS = frozenset({"linear_attention", "conv", "hybrid", "hybrid_sliding"})
"""Types of layers that keep recurrent states."""
SUPPORTED_LAYER_TYPES = ATTENTION_LAYERS.keys() | RECURRENT_LAYERS | {"mlp", "moe"}
DEFAULT_CHUNK = 64
"""Tokens that recurrent layers take together, if the config of a model does not say: those of a gated delta rule."""


_in_use: WeakKeyDictionary[nn.Module, threading.Lock] = WeakKeyDictionary()
"""Held while a network runs: another engine that is made of it changes its attention, to compare."""
_served: WeakKeyDictionary[nn.Module, StateLayout] = WeakKeyDictionary()
"""The states of networks whose recurrent layers are served already."""
_indexed: WeakSet[nn.Module] = WeakSet()
"""Networks whose indexers are served already."""
_claiming = threading.Lock()
os.register_at_fork(after_in_child=_in_use.clear)  # the parent may hold them


class TransformersModel:
    """A transformers model, ready to run ragged batches over a paged cache. Its attributes are those of `Model`.

    Raises ModelError with the reason if the model would be wrong here.
    """

    has_own_threads = False
    batch_invariant = False

    def __init__(self, network: Any) -> None:
        from transformers import AttentionInterface, AttentionMaskInterface

        AttentionInterface.register(ATTENTION_NAME, paged_attention)
        for name in (PROBE_NAME, INDEXED_NAME):
            AttentionInterface.register(name, paged_attention)
        AttentionMaskInterface.register(PROBE_NAME, probe_mask)
        AttentionMaskInterface.register(INDEXED_NAME, placeholder_mask)
        self._network = network
        with _claiming:
            self._in_use = _in_use.setdefault(network, threading.Lock())
        self.name = type(network).__name__
        self.config = network.config.get_text_config()
        self.kind: str = self.config.model_type
        self.dtype: torch.dtype = network.dtype
        self.device = input_device(network)
        self._rows_on_host = accept_host_rows(network)
        self._is_emulated = self.dtype == torch.bfloat16 and not has_bfloat16(self.device)
        self.vocab_size: int = self.config.vocab_size
        self.max_model_len = _max_model_len(self.config)
        self.short_context: int | None = None
        self._adapters: ModuleAdapters | None = None
        try:
            _check_config(network.config, self.config)
            self._attention_name = self._serve_indexers()
            self._recurrent = self._serve_recurrent_layers()
            self.layers, self.windows, self.layer_devices = self._probe()
        except ModelError as error:
            raise ModelError(f"{self.name} is not supported: {error}.") from error
        except Exception as error:  # whatever a model's own code raises
            raise ModelError(f"{self.name} is not supported: it fails on a ragged batch ({error}).") from error

    @property
    def states(self) -> list[StateShape]:
        return [] if self._recurrent is None else self._recurrent.shapes

    @property
    def state_devices(self) -> list[torch.device]:
        return [] if self._recurrent is None else self._recurrent.devices

    @property
    def chunk_multiple(self) -> int:
        return 1 if self._recurrent is None else _chunk_multiple(self.config, self._recurrent)

    @property
    def has_index(self) -> bool:
        """Whether indexers keep keys of their own, which only the reference of attention serves."""
        return len(self.layers) > len(self.windows)

    def go_on_by_token(self) -> bool:
        """Gives its recurrent layers prompts that go on from a state token by token; False if that changes nothing."""
        if self._recurrent is None or self._recurrent.by_token:
            return False
        self._recurrent.by_token = True
        return True

    def with_adapters(self, adapters: Sequence[Adapter]) -> TransformersModel:
        """See `Model`. Tries all of them on a few tokens, so that no step fails later."""
        if self.states or len({self.device, *self.layer_devices}) > 1:
            raise ModelError(
                f"{self.name} takes no LoRA adapters here: models that transformers runs take them only if they are on "
                "one device and have no recurrent layers."
            )
        model = copy(self)
        model._adapters = ModuleAdapters(self._network, adapters)
        for number in range(len(adapters)):
            model._probe(np.full(4, number + 1))
        return model

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in parameters_once(self._network))

    @property
    def weight_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in parameters_once(self._network))

    @property
    def linear_cost(self) -> LinearCost:
        return linear_cost_of(self._network, self.config)

    @cached_property
    def capturable(self) -> CapturableNetwork | None:
        """Its decoder and its head by themselves, if together they are the network; see `CapturableNetwork`."""
        if self._is_emulated or self.states or self.has_index or len({self.device, *self.layer_devices}) > 1:
            return None
        return CapturableNetwork.of(self, self._network)

    @torch.inference_mode()
    def forward(self, batch: RaggedBatch, kv_cache: KVCache, attention: AttentionBackend) -> Logits:
        """Logits [R, vocabulary] of the wanted rows, where they are sampled (`samples_on`).

        They are in the model's dtype, or in float32 if the sampling kernel cannot read that.
        """
        with self._checked(AttentionCalls(kv_cache, attention, batch, self.windows)), self._recurring(batch):
            logits = self._call(batch)
        if self._is_emulated:
            logits = logits.float()
        return Logits(logits if samples_on(self.device) else logits.cpu())

    def _recurring(self, batch: RaggedBatch) -> AbstractContextManager[None]:
        if self._recurrent is None or batch.states is None:
            return nullcontext()
        return recurring(self._recurrent, batch.states, batch.starts, batch.stops)

    def _adapting(self, batch: RaggedBatch) -> AbstractContextManager[None]:
        if self._adapters is None or batch.adapters is None:
            return nullcontext()
        return self._adapters.applied(batch.adapters)

    @contextmanager
    def _checked(self, step: AttentionCalls) -> Iterator[None]:
        """Raises ModelError if it calls attention more or less often than when it was loaded."""
        with self._in_use, attending(step):
            yield
        if step.calls != len(self.windows):
            raise ModelError(
                f"it called attention {step.calls} times in a step, and {len(self.windows)} times when it was loaded"
            )

    def _call(self, batch: RaggedBatch) -> Tensor:
        with self._adapting(batch):
            output = self._network(
                input_ids=batch.input_ids[None],
                position_ids=batch.position_ids[None],
                use_cache=False,
                logits_to_keep=torch.from_numpy(batch.rows) if self._rows_on_host else batch.logit_rows,
            )
        logits: Tensor = output.logits[0]
        if logits.shape[0] == len(batch.rows):
            return logits
        return logits[batch.logit_rows]  # some families ignore logits_to_keep

    def in_step(self, kv_cache: KVCache, attention: AttentionBackend, metadata: Any) -> AbstractContextManager[None]:
        """While parts of the network run for a step. metadata: what `attention.prepare` returned for it"""
        return self._checked(AttentionCalls(kv_cache, attention, None, self.windows, {self.device: metadata}))

    def plain_logits(self, token_ids: list[int]) -> Tensor:
        """Logits [T, vocabulary] of one sequence by the model's own forward, with its own attention."""
        logits: Tensor = self._plain(self._network, token_ids).logits[0]
        return logits

    def plain_hidden_states(self, decoder: Any, token_ids: list[int]) -> Tensor:
        """What the network's decoder gives for one sequence [T, hidden], likewise."""
        hidden: Tensor = self._plain(decoder, token_ids)[0][0]
        return hidden

    def _plain(self, module: Any, token_ids: list[int]) -> Any:
        ids = torch.tensor([token_ids], device=self.device)
        with self._own_attention():
            return module(input_ids=ids, use_cache=False)

    @contextmanager
    def _own_attention(self) -> Iterator[None]:
        """While the network computes as it does in transformers."""
        with self._in_use:
            self._network.set_attn_implementation("eager")
            try:
                yield
            finally:
                self._network.set_attn_implementation(self._attention_name)

    def _serve_indexers(self) -> str:
        """The name of the attention function that it calls in a step."""
        if not INDEXED_LAYERS.intersection(getattr(self.config, "layer_types", None) or ()):
            return ATTENTION_NAME
        self._attention_name = INDEXED_NAME
        with _claiming:
            if self._network not in _indexed:
                with self._own_attention(), torch.inference_mode():
                    serve_indexers(self._network, self.config, self.device)
                _indexed.add(self._network)
        return INDEXED_NAME

    def _serve_recurrent_layers(self) -> StateLayout | None:
        """The states of its recurrent layers; None if it has none."""
        is_recurrent = RECURRENT_LAYERS.intersection(getattr(self.config, "layer_types", None) or ())
        if not is_recurrent and not modules_with_conventions(self._network):
            return None
        with _claiming:
            if self._network not in _served:
                with self._own_attention(), torch.inference_mode():
                    _served[self._network] = serve_modules(self._network, self.config, self.device)
        return replace(_served[self._network])

    def _probe(
        self, adapters: NDArray[np.int64] | None = None
    ) -> tuple[list[LayerShape], list[int | None], list[torch.device]]:
        """The shape of what each attention call stores, its window, and where it computes."""
        probe = AttentionProbe()
        four, table = np.arange(4), np.arange(4, dtype=np.int32)[None]
        batch = RaggedBatch(
            four % self.vocab_size, four, four, four[-1:], table, [0], [4], self.device, adapters=adapters
        )
        with self._in_use, torch.inference_mode(), attending(probe):
            self._network.set_attn_implementation(PROBE_NAME)
            self._call(batch)
            self._network.set_attn_implementation(self._attention_name)
        layers = len(_attention_kinds(self.config) or range(self.config.num_hidden_layers))
        if self._recurrent is None and len(probe.shapes) < layers:
            raise ModelError(
                f"{len(probe.shapes)} of its {layers} layers call attention that can be paged; "
                "the others (recurrent, convolutional, or with attention of their own) would be silently wrong"
            )
        _check_patterns(self.config, probe.patterns)
        chunks = [pattern.chunk for pattern in probe.patterns if pattern.chunk]
        self.max_model_len = min([self.max_model_len, *chunks])  # within its first chunk a layer sees every token
        indices = [LayerShape(1, dim, 0) for dim, _ in probe.index_dims]
        devices = [*probe.devices, *(device for _, device in probe.index_dims)]
        return probe.shapes + indices, [pattern.window for pattern in probe.patterns], devices


def _attention_kinds(config: Any) -> list[str]:
    """Which tokens the layers see that attend, as far as the config says; without recurrent and feed-forward layers."""
    kinds = getattr(config, "layer_types", None) or ()
    return [ATTENTION_LAYERS[kind] for kind in kinds if kind in ATTENTION_LAYERS]


def _chunk_multiple(config: Any, states: StateLayout) -> int:
    """How many tokens its recurrent layers take together."""
    if all(kind == "conv" for _, kind, _ in states.numbers):
        return 1
    sizes = (getattr(config, name, None) for name in ("mamba_chunk_size", "chunk_size", "block_size"))
    return next((size for size in sizes if isinstance(size, int) and size > 0), DEFAULT_CHUNK)


def _max_model_len(config: Any) -> int:
    names = (
        "max_position_embeddings",
        "n_positions",
        "max_target_positions",
        "max_sequence_length",
        "max_seq_len",
        "seq_length",
    )
    lengths = (getattr(config, name, None) for name in names)
    longest = next((length for length in lengths if isinstance(length, int) and length > 0), 2048)
    for parameters in _rope_parameters(config):
        # Once the longest text of a batch passes this length, the encoding of every token changes.
        switch = parameters.get("original_max_position_embeddings")
        if parameters.get("rope_type") == "longrope" and isinstance(switch, int):
            longest = min(longest, switch)
    return longest


def _rope_parameters(config: Any) -> list[dict[str, Any]]:
    """The rotary settings of a config, one for all layers or one for each type of layer."""
    rope = getattr(config, "rope_parameters", None) or {}
    return list(rope.values()) if rope and all(isinstance(value, dict) for value in rope.values()) else [rope]


def _check_config(config: Any, text_config: Any) -> None:
    """Refuses what the probe, which has only a few tokens, cannot see."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError("it is an encoder-decoder")
    if getattr(text_config, "is_decoder", None) is False and hasattr(text_config, "add_cross_attention"):
        architectures = getattr(config, "architectures", None) or [""]
        if not any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
            raise ModelError("it is an encoder")
    if getattr(text_config, "attn_temperature_tuning", None):
        raise ModelError("it scales attention by the index of a token in the batch")
    kinds = set(getattr(text_config, "layer_types", None) or ()) - SUPPORTED_LAYER_TYPES
    if kinds:
        raise ModelError(f"it has layers of type {', '.join(sorted(kinds))}, which this engine does not support")


def _check_patterns(config: Any, patterns: list[MaskPattern]) -> None:
    """Checks that the masks agree with the config, by which `generate` sizes its cache."""
    kinds = _attention_kinds(config)
    if not getattr(config, "layer_types", None):
        in_use = bool(getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True))
        kinds = ["sliding_attention" if in_use and _knows_windows(config) else "full_attention"] * len(patterns)
    if len(kinds) != len(patterns):
        raise ModelError(f"it calls attention {len(patterns)} times in {len(kinds)} layers of different types")
    wrong = [layer for layer, pattern in enumerate(patterns) if pattern.kind != kinds[layer]]
    if wrong:
        raise ModelError(f"the sliding windows of its layers {wrong} differ from its config")


def _knows_windows(config: Any) -> bool:
    """Whether a window is a setting of this family, rather than a stray key in one config file."""
    try:
        return "sliding_window" in type(config)().to_dict()
    except Exception:  # a config class without defaults
        return True
