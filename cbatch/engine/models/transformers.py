"""Any causal language model of transformers that goes through its AttentionInterface, on ragged batches.

One attention function is registered under the name `cbatch`, and one keyword, `paged`, carries everything it
needs through the model's own forward. A mask name that is not registered makes transformers build no mask.

A model that keeps state anywhere else than in the keys and values seen here (recurrent layers, convolutions
over tokens, caches shared between layers, position encodings that depend on the length of the whole text)
would run on a ragged row and be silently wrong. `TransformersModel` refuses it: a probe looks at every call of
the interface, and a small ragged step in two chunks is compared with the model's own forward.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from cbatch.engine.attention.interface import AttentionBackend
from cbatch.engine.batch import RaggedBatch
from cbatch.engine.errors import ModelError
from cbatch.engine.kv_pool import KVPool, LayerShape

ATTENTION_NAME = "cbatch"

IGNORED_KEYWORDS = frozenset({"dropout", "is_causal", "position_ids", "use_cache"})
"""Keywords of an attention call that say nothing new about a causal, paged, inference-only call.

Nor do `output_...` switches, which ask for what else a model may return.
"""


@dataclass(frozen=True, slots=True)
class PagedContext:
    """What the layers of one step share: the cache, where to write, and how to attend."""

    pool: KVPool
    backend: AttentionBackend
    metadata: Any
    slot_mapping: Tensor

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        """Writes the step's keys and values [T, heads, dim] of a layer, then attends with query [T, heads, dim]."""
        self.pool.write(layer, key, value, self.slot_mapping)
        keys, values = self.pool.keys[layer], self.pool.values[layer]
        return self.backend.attend(query, keys, values, self.metadata, **options)


@dataclass(slots=True)
class Probe:
    """Stands in for a PagedContext in the first call of a model and writes down what each layer stores."""

    shapes: dict[int, LayerShape] = field(default_factory=dict)
    windows: dict[int, int | None] = field(default_factory=dict)
    calls: int = 0

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
        self.calls += 1
        self.shapes[layer] = LayerShape(key.shape[1], key.shape[2], value.shape[2])
        self.windows[layer] = options["window"]
        return query.new_zeros(*query.shape[:2], value.shape[2])


def paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    paged: PagedContext | Probe,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **keywords: Any,
) -> tuple[Tensor, None]:
    """The function that transformers calls for each attention layer: query, key, value [1, heads, T, dim]."""
    unknown = sorted(
        name
        for name, value in keywords.items()
        if value is not None and name not in IGNORED_KEYWORDS and not name.startswith("output_")
    )
    if unknown or attention_mask is not None:
        what = ", ".join(unknown) or "a mask of its own"
        raise ModelError(f"its attention layers use {what}, which this engine does not know")
    out = paged.attend(
        int(module.layer_idx),  # type: ignore[arg-type]
        query[0].transpose(0, 1),
        key[0].transpose(0, 1),
        value[0].transpose(0, 1),
        scale=float(scaling) if scaling is not None else query.shape[-1] ** -0.5,
        window=sliding_window,
        softcap=softcap,
        sinks=s_aux,
    )
    return out[None], None


class TransformersModel:
    """A network of transformers, ready to run ragged batches over a paged cache.

    layers:         shape of what each attention layer stores, in layer order
    max_model_len:  longest sequence, prompt and output, in tokens
    Raises ModelError where the network would be wrong here, with the reason.
    """

    def __init__(self, network: Any) -> None:
        from transformers import AttentionInterface

        AttentionInterface.register(ATTENTION_NAME, paged_attention)
        self._network = network
        self.name = type(network).__name__
        self.config = network.config.get_text_config()
        self.dtype: torch.dtype = network.dtype
        self.device: torch.device = network.device
        self.vocab_size: int = self.config.vocab_size
        self.max_model_len = _max_model_len(self.config)
        try:
            _check_config(network.config, self.config)
            network.set_attn_implementation(ATTENTION_NAME)
            self.layers = self._probe()
        except ModelError as error:
            raise ModelError(f"{self.name} is not supported: {error}.") from error
        except Exception as error:  # whatever a model's own code raises when it is called in a new way
            raise ModelError(f"{self.name} is not supported: it fails on a ragged batch ({error}).") from error

    @property
    def num_parameters(self) -> int:
        return sum(parameter.numel() for parameter in self._network.parameters())

    @property
    def weight_bytes(self) -> int:
        return sum(p.numel() * p.element_size() for p in self._network.parameters())

    def forward(self, batch: RaggedBatch, context: PagedContext | Probe) -> Tensor:
        """Logits [R, vocabulary] of the rows to sample, in the model's dtype."""
        output = self._network(
            input_ids=batch.input_ids[None],
            position_ids=batch.position_ids[None],
            use_cache=False,
            logits_to_keep=batch.logit_rows,
            paged=context,
        )
        logits: Tensor = output.logits[0]
        return logits

    def plain_logits(self, token_ids: list[int]) -> Tensor:
        """Logits [T, vocabulary] of one sequence by the model's own forward, without our attention."""
        self._network.set_attn_implementation("eager")
        try:
            ids = torch.tensor([token_ids], device=self.device)
            logits: Tensor = self._network(input_ids=ids, use_cache=False).logits[0]
        finally:
            self._network.set_attn_implementation(ATTENTION_NAME)
        return logits

    def _probe(self) -> list[LayerShape]:
        probe = Probe()
        ids = torch.arange(4, device=self.device) % self.vocab_size
        batch = RaggedBatch(ids, torch.arange(4, device=self.device), ids, ids[-1:], ids[None], [0], [4])
        with torch.inference_mode():
            logits = self.forward(batch, probe)
        if logits.shape[0] != 1:
            raise ModelError(f"it gives logits of shape {tuple(logits.shape)} where one row was asked for")
        layers = self.config.num_hidden_layers
        if sorted(probe.shapes) != list(range(layers)) or probe.calls != layers:
            raise ModelError(
                f"{len(probe.shapes)} of its {layers} layers keep their past in attention that can be paged; "
                "the others (recurrent, convolutional, shared or built in) would be silently wrong"
            )
        _check_windows(self.config, probe.windows)
        return [probe.shapes[layer] for layer in range(layers)]


def _max_model_len(config: Any) -> int:
    for name in ("max_position_embeddings", "n_positions", "max_sequence_length", "seq_length"):
        length = getattr(config, name, None)
        if isinstance(length, int) and length > 0:
            return length
    return 2048


def _check_config(config: Any, text_config: Any) -> None:
    """Refuses what a probe of a few tokens cannot see."""
    if getattr(config, "is_encoder_decoder", False):
        raise ModelError("it is an encoder-decoder")
    if getattr(text_config, "is_decoder", None) is False and hasattr(text_config, "add_cross_attention"):
        architectures = getattr(config, "architectures", None) or [""]
        if not any(str(name).endswith(("ForCausalLM", "LMHeadModel")) for name in architectures):
            raise ModelError("it is an encoder")
    rope = getattr(text_config, "rope_parameters", None) or {}
    nested = rope.values() if rope and all(isinstance(value, dict) for value in rope.values()) else [rope]
    for parameters in nested:
        kind = parameters.get("rope_type", "default")
        if kind in ("longrope", "dynamic"):
            raise ModelError(f"its position encoding ({kind}) changes with the length of the whole text")
    if getattr(text_config, "attn_temperature_tuning", None):
        raise ModelError("it scales attention by the place of a token in the whole row")
    kinds = set(getattr(text_config, "layer_types", None) or ()) - {"full_attention", "sliding_attention"}
    if kinds:
        raise ModelError(f"it has layers of kind {', '.join(sorted(kinds))}")


def _check_windows(config: Any, windows: dict[int, int | None]) -> None:
    """The windows that reach the attention calls must be those of the config: a model may use its mask alone."""
    kinds = getattr(config, "layer_types", None)
    if kinds:
        wanted = [kind == "sliding_attention" for kind in kinds]
    else:
        in_use = bool(getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True))
        wanted = [in_use and _knows_windows(config)] * len(windows)
    wrong = [layer for layer, window in sorted(windows.items()) if bool(window) != wanted[layer]]
    if wrong:
        raise ModelError(f"the sliding window of its layers {wrong} is not what its config says")


def _knows_windows(config: Any) -> bool:
    """Whether a window is a setting of this family, and not a stray key in one config file."""
    try:
        return "sliding_window" in type(config)().to_dict()
    except Exception:  # a config class that has no defaults
        return True
