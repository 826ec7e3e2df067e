"""Which models the fast path computes, and what it needs to know of their config.json."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cbatch.engine.models.programs.config_reader import UnsupportedConfig

FAMILIES = frozenset({"llama", "mistral", "qwen2", "qwen3"})
"""Values of `model_type` whose layers are all: norm, attention with rotary positions, norm, gated feed-forward part."""


@dataclass(frozen=True, slots=True)
class LlamaSpec:
    """The sizes and settings of a model of the Llama family.

    windows:    for each layer, how many tokens back a token sees, including itself; 0 for all
    inv_freq:   [head_dim / 2] float32, radians from one position to the next
    """

    model_type: str
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_model_len: int
    rms_norm_eps: float
    windows: tuple[int, ...]
    inv_freq: Tensor
    is_tied: bool

    @property
    def num_layers(self) -> int:
        return len(self.windows)


def read_llama_spec(config: Mapping[str, Any]) -> LlamaSpec:
    """Reads a config.json as transformers does. Raises UnsupportedConfig for what the fast path does not support."""
    try:
        return _read(config)
    except UnsupportedConfig:
        raise
    except KeyError as error:
        raise UnsupportedConfig(f"its config.json has no {error.args[0]}") from error
    except Exception as error:  # any error that unexpected values cause
        raise UnsupportedConfig(f"its config.json is unusual ({error})") from error


def _read(config: Mapping[str, Any]) -> LlamaSpec:
    kind = config.get("model_type")
    if kind not in FAMILIES:
        raise UnsupportedConfig(f"its model type {kind} is not of the Llama family")
    if config.get("hidden_act", "silu") != "silu":
        raise UnsupportedConfig(f"its activation is {config['hidden_act']}")
    if config.get("quantization_config"):
        raise UnsupportedConfig("its weights are quantized")
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    head_dim = int(config.get("head_dim") or hidden // heads)
    kv_heads = int(config.get("num_key_value_heads") or heads)
    if heads % kv_heads or min(heads, kv_heads, head_dim, int(config["num_hidden_layers"])) < 1:
        raise UnsupportedConfig(f"its {heads} query heads cannot share {kv_heads} KV heads")
    return LlamaSpec(
        model_type=str(kind),
        hidden_size=hidden,
        intermediate_size=int(config["intermediate_size"]),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        vocab_size=int(config["vocab_size"]),
        max_model_len=int(config["max_position_embeddings"]),
        rms_norm_eps=float(config["rms_norm_eps"]),
        windows=_windows(config),
        inv_freq=_frequencies(config, head_dim),
        is_tied=bool(config["tie_word_embeddings"]),
    )


def _windows(config: Mapping[str, Any]) -> tuple[int, ...]:
    layers, kinds = int(config["num_hidden_layers"]), config.get("layer_types")
    has_window = config["model_type"] == "mistral" or bool(config.get("use_sliding_window"))
    window = int(config["sliding_window"] or 0) if has_window else 0  # if the key is absent, there is a default
    if kinds is not None:
        if not set(kinds) <= {"full_attention", "sliding_attention"} or len(kinds) != layers:
            raise UnsupportedConfig("it has layers of other types")
        if not has_window and "sliding_attention" in kinds:
            raise UnsupportedConfig("its config has sliding windows, which its family does not support")
        return tuple(window if kind == "sliding_attention" else 0 for kind in kinds)
    first = int(config["max_window_layers"]) if window and config["model_type"].startswith("qwen") else 0
    return tuple(window if layer >= first else 0 for layer in range(layers))


def _frequencies(config: Mapping[str, Any], head_dim: int) -> Tensor:
    """Rotary frequencies (Su et al., 2021), scaled as the config says; older files use other names."""
    rope = {"rope_theta": config.get("rope_theta", 10000.0)}
    rope |= config.get("rope_scaling") or {}
    rope |= config.get("rope_parameters") or {}
    kind = rope.get("rope_type", rope.get("type", "default"))
    part = float(rope.get("partial_rotary_factor", config.get("partial_rotary_factor") or 1.0))
    if part != 1 or head_dim % 2:
        raise UnsupportedConfig("its rotary embedding covers only a part of each head")
    width = head_dim
    frequencies: Tensor = 1.0 / rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width)
    if kind == "default":
        return frequencies
    if kind == "linear":
        return frequencies / float(rope["factor"])
    if kind == "llama3":
        return _llama3(frequencies, rope)
    raise UnsupportedConfig(f"its rotary embedding has the type {kind}")


def _llama3(frequencies: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Scales low frequencies, keeps high ones, and blends those between, as in Llama 3.1."""
    factor, low, high = float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    context = float(rope["original_max_position_embeddings"])
    lengths = 2 * math.pi / frequencies
    kept = (context / lengths - low) / (high - low)
    blended = (1 - kept) * frequencies / factor + kept * frequencies
    stretched = torch.where(lengths > context / low, frequencies / factor, blended)
    return torch.where(lengths < context / high, frequencies, stretched)


def weight_shapes(spec: LlamaSpec) -> dict[str, tuple[int, ...]]:
    """Names and shapes of all weights that a model of the family must have."""
    hidden, inner = spec.hidden_size, spec.intermediate_size
    query, cache = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (spec.vocab_size, hidden),
        "model.norm.weight": (hidden,),
    }
    if not spec.is_tied:
        shapes["lm_head.weight"] = (spec.vocab_size, hidden)
    layer: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (query, hidden),
        "self_attn.k_proj.weight": (cache, hidden),
        "self_attn.v_proj.weight": (cache, hidden),
        "self_attn.o_proj.weight": (hidden, query),
        "mlp.gate_proj.weight": (inner, hidden),
        "mlp.up_proj.weight": (inner, hidden),
        "mlp.down_proj.weight": (hidden, inner),
    }
    if spec.model_type == "qwen2":
        sizes = {"q": query, "k": cache, "v": cache}
        layer |= {f"self_attn.{part}_proj.bias": (size,) for part, size in sizes.items()}
    if spec.model_type == "qwen3":
        layer |= {f"self_attn.{part}_norm.weight": (spec.head_dim,) for part in "qk"}
    for number in range(spec.num_layers):
        shapes |= {f"model.layers.{number}.{name}": shape for name, shape in layer.items()}
    return shapes


def check_weights(spec: LlamaSpec, tensors: Mapping[str, Tensor]) -> int:
    """The number of parameters. Raises UnsupportedConfig unless the files hold exactly the weights of the family."""
    shapes = weight_shapes(spec)
    head = "lm_head.weight"
    spare = {head} if spec.is_tied else set()
    odd = ({name for name in tensors if not name.endswith("rotary_emb.inv_freq")} - spare) ^ shapes.keys()
    if odd:
        raise UnsupportedConfig(f"one of its weights is missing, or unknown in its family: {min(odd)}")
    wrong = [name for name, shape in shapes.items() if tuple(tensors[name].shape) != shape]
    if wrong:
        raise UnsupportedConfig(f"the shape of {wrong[0]} does not match its config")
    if head in spare and head in tensors and not torch.equal(tensors[head], tensors["model.embed_tokens.weight"]):
        raise UnsupportedConfig("its head is tied to its embedding, but in its files the two differ")
    return sum(math.prod(shape) for shape in shapes.values())
