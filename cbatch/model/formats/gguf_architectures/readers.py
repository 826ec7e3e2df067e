"""What declarations of architectures are made of: rules of tensors that many share, and readers of settings."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from cbatch.model.families.builder import deinterleaved
from cbatch.model.formats.gguf_architectures.architecture import (
    LAYER,
    MAX_EXPERTS,
    MODEL,
    Architecture,
    Config,
    Metadata,
    Read,
    Rule,
    Rules,
    Shape,
    architectures,
    check_heads,
)


def declare(
    name: str,
    kind: str,
    class_name: str,
    *,
    more: Sequence[Read] = (),
    layer: Rules = LAYER,
    model: Rules = MODEL,
    layers: str = "model.layers.{}.",
    made: Callable[[Metadata, Config], Mapping[str, Tensor]] = lambda data, config: {},
    check: Read = check_heads,
    norm_offset: float = 0.0,
    plain_norms: tuple[str, ...] = (),
    when: Callable[[Metadata], bool] = lambda data: True,
    **settings: Any,
) -> None:
    """Registers a declaration for the `general.architecture` name; see `Architecture`."""
    settings = {"rope_parameters": read_rope, "hidden_act": "silu"} | settings
    declared = Architecture(
        kind, class_name, settings, more, layer, model, layers, made, check, norm_offset, plain_norms, when
    )
    architectures.setdefault(name, []).append(declared)


def number(name: str, default: float) -> Read:
    return lambda data, config: data.number(name, default)


def whole(name: str, default: int) -> Read:
    return lambda data, config: data.whole(name, default)


def flag(name: str, default: bool) -> Read:
    return lambda data, config: data.flag(name, default)


def has(tensor: str) -> Read:
    """Whether the first layer has a tensor."""
    return lambda data, config: data.has_tensor(f"blk.0.{tensor}")


def has_any(tensor: str) -> Read:
    """Whether a layer has a tensor."""
    return lambda data, config: bool(data.shapes(tensor))


def permuted(name: str, heads: str) -> Rule:
    """Queries or keys whose neighbours are rotated together, as llama.cpp has those of Llama and its kin."""

    def order(config: Config, rows: int) -> Tensor | None:
        count, head_dim = config[heads], config["head_dim"]
        if rows != count * head_dim or head_dim % 2:
            return None
        return deinterleaved(count, head_dim, head_dim)

    return Rule(name, rows=order)


PERMUTED: Rules = {
    "attn_q": permuted("self_attn.q_proj", "num_attention_heads"),
    "attn_k": permuted("self_attn.k_proj", "num_key_value_heads"),
}


def flat(shape: Shape) -> Shape:
    """That of a vector, whatever the file makes of it."""
    return (math.prod(shape),)


def with_channel(shape: Shape) -> Shape:
    """That of a convolution's weight: transformers has a dimension of one channel between the others."""
    return (shape[0], 1, shape[1]) if len(shape) == 2 else shape


def decay_log(config: Config, parts: Sequence[Tensor]) -> Tensor:
    """Of how fast a state fades: the file has -exp of it."""
    return torch.log(-parts[0].float()).flatten()


def experts(
    prefix: str = "mlp.experts.{}.", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> Rules:
    """The matrices of all experts, which transformers has one by one."""
    return {
        "ffn_gate_exps": prefix + gate, "ffn_up_exps": prefix + up, "ffn_down_exps": prefix + down,
        "ffn_gate_up_exps": Rule(prefix + gate, prefix + up),
    }  # fmt: skip


def shared_experts(prefix: str) -> Rules:
    return {f"ffn_{part}_shexp": f"{prefix}{part}_proj" for part in ("gate", "up", "down")}


def read_experts(data: Metadata) -> tuple[int, int]:
    """How many experts there are, and how many a token has."""
    count, top_k = data.whole("expert_count"), data.whole("expert_used_count")
    shapes = data.shapes("ffn_down_exps.weight")
    if any(len(shape) != 3 or shape[0] != count for shape in shapes) or not shapes:
        raise data.refused(f"claims to have {count} experts, and its tensors differ")
    if not 1 <= top_k <= count <= MAX_EXPERTS:
        raise data.refused(f"claims to have {count} experts, of which a token has {top_k}")
    return count, top_k


def expert_size(data: Metadata) -> int:
    """The width of an expert, which not every file says."""
    return data.shapes("ffn_down_exps.weight")[0][2]


def read_rope(data: Metadata, config: Config, default_base: float = 10000.0) -> Config:
    """The settings of rotary positions."""
    head_dim, base = config["head_dim"], data.number("rope.freq_base", default_base)
    rotated = data.whole("rope.dimension_count", head_dim)
    if rotated > head_dim:
        raise data.refused(f"claims to rotate {rotated} numbers of a head of {head_dim}")
    rope: Config = {"rope_type": "default", "rope_theta": base}
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    if base <= 0:
        raise data.refused(f"has {base} as rope.freq_base")
    factors = data.factors("rope_freqs.weight", rotated // 2)
    scaling = data.text("rope.scaling.type", "none")
    factor = data.number("rope.scaling.factor", 1.0)
    if factors is not None:
        return rope | {"rope_type": "factors", "factors": factors}
    if scaling == "linear" and factor != 1:
        return rope | {"rope_type": "linear", "factor": factor}
    if scaling == "yarn":
        return rope | _read_yarn(data, factor)
    if scaling not in ("none", "linear", "longrope"):
        raise data.refused(f"scales rotary positions as {scaling[:40]!r}, which is not read")
    return rope


def _read_yarn(data: Metadata, factor: float) -> Config:
    original = data.whole("rope.scaling.original_context_length")
    rope: Config = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for theirs, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if data.has(f"rope.scaling.{theirs}"):
            rope[ours] = data.number(f"rope.scaling.{theirs}")
    return rope


def read_layer_types(data: Metadata, config: Config, period: int) -> list[str]:
    """Which layers have windows, by the flags of the file, or all but the last of so many."""
    layers = config["num_hidden_layers"]
    flags = data.flags("attention.sliding_window_pattern", layers)
    if flags is None:
        flags = [(number + 1) % period > 0 for number in range(layers)]
    return ["sliding_attention" if flag else "full_attention" for flag in flags]


TURNED = LAYER | PERMUTED
BIASES: dict[str, Any] = {"attention_bias": has("attn_q.bias"), "mlp_bias": has("ffn_down.bias")}
AFTER_ATTENTION: Rules = {"post_attention_norm": "post_attention_layernorm"}
BOTH_AFTER: Rules = AFTER_ATTENTION | {"post_ffw_norm": "post_feedforward_layernorm"}
LATE_NORMS: Rules = {"attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}
QUERY_BIAS: dict[str, Any] = {"attention_bias": has("attn_q.bias")}


def mixture(count: str, top_k: str = "num_experts_per_tok", size: str = "") -> Read:
    """The number of experts and of those that a token has, and the width of each, under the names of a family."""

    def read(data: Metadata, config: Config) -> Config:
        found = dict(zip((count, top_k), read_experts(data), strict=True))
        return found | ({size: expert_size(data)} if size else {})

    return read


def window(data: Metadata, config: Config) -> int:
    return data.whole("attention.sliding_window")


def layer_norm(key: str) -> Read:
    """Of a model with LayerNorm: what its epsilon is called."""

    def read(data: Metadata, config: Config) -> Config:
        config.pop("rms_norm_eps", None)
        return {key: data.number("attention.layer_norm_epsilon")}

    return read


def rope(base: float = 10000.0, *, share: float | None = None) -> Read:
    """Rotary settings by other defaults. share: of each head that is rotated if the file does not say it"""

    def read(data: Metadata, config: Config) -> Config:
        rope = read_rope(data, config, base)
        return rope if share is None else {"partial_rotary_factor": share} | rope

    return read


def local_rope(base: float, local: float | None = None) -> Read:
    """Frequencies are scaled in full attention only. local: base in windows; None: that of full attention"""

    def read(data: Metadata, config: Config) -> Config:
        full = read_rope(data, config, base)
        theta = data.number("rope.freq_base_swa", local or full["rope_theta"])
        return {"full_attention": full, "sliding_attention": {"rope_type": "default", "rope_theta": theta}}

    return read


def long_rope(data: Metadata, config: Config) -> Config:
    rope, rotated = read_rope(data, config), data.whole("rope.dimension_count", config["head_dim"])
    short, long = (data.factors(f"rope_factors_{name}.weight", rotated // 2) for name in ("short", "long"))
    if short is not None and long is not None:
        rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        rope["original_max_position_embeddings"] = data.whole("rope.scaling.original_context_length")
        if data.has("rope.scaling.attn_factor"):
            rope["attention_factor"] = data.number("rope.scaling.attn_factor")
    return rope


def optional_windows(data: Metadata, config: Config) -> Config:
    size = data.whole("attention.sliding_window", 0) or None
    return {"sliding_window": size} | ({"layer_types": read_layer_types(data, config, 4)} if size else {})


def shared_size(data: Metadata, config: Config) -> int:
    shapes = data.shapes("ffn_gate_shexp.weight")
    return shapes[0][0] if shapes else 0


def biased(data: Metadata, config: Config, function: int = 2) -> Config:
    """Of experts that are chosen by sigmoids with a bias. function: llama.cpp's number for sigmoids, or for softmax"""
    if data.whole("expert_gating_func", function) != function:
        raise data.refused("chooses experts in another way than its architecture does")
    return {
        "n_shared_experts": data.whole("expert_shared_count", 0),
        "first_k_dense_replace": data.whole("leading_dense_block_count", 0),
        "routed_scaling_factor": data.number("expert_weights_scale", 1.0),
        "norm_topk_prob": data.flag("expert_weights_norm", False),
        "n_group": data.whole("expert_group_count", 1) or 1,
        "topk_group": data.whole("expert_group_used_count", 1) or 1,
    }
