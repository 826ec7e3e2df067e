"""Parts of declarations of architectures: rules of tensors that many share, and readers of settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields
from functools import partial
from typing import Any

from torch import Tensor

from cbatch.model.families.builder import deinterleaved
from cbatch.model.formats.gguf_architectures import architecture
from cbatch.model.formats.gguf_architectures.architecture import BEHIND, Config, Metadata, Read, Rule, Rules


def declare(names: str, kind: str = "", /, **given: Any) -> None:
    """Registers a declaration for `general.architecture` names.

    kind:  by default, the first name
    given: fields of an `Architecture`, whose rules are beside the common ones, and settings
    """
    given = {"rope_parameters": read_rope} | given
    own = {field.name: given.pop(field.name) for field in fields(architecture.Architecture) if field.name in given}
    layer = own.pop("layer", {})
    layer |= {part: BEHIND for rule in layer.values() for part in rule.parts}
    declared = architecture.Architecture(kind or names.split()[0], layer, given, **own)
    for name in names.split():
        architecture.architectures.setdefault(name, []).append(declared)


def value(name: str, default: Any) -> Read:
    """A setting of the type of its default: a flag, a whole number, or any number."""
    read: Any = {bool: Metadata.flag, int: Metadata.whole, float: Metadata.number}[type(default)]
    return lambda data, config: read(data, name, default)


def has(tensor: str) -> Read:
    """Whether a layer has a tensor."""
    return lambda data, config: bool(data.shapes(tensor))


def types(tensor: str, there: str, otherwise: str) -> Read:
    """The type of each layer, by a tensor that it may have."""
    return lambda data, config: [
        there if data.has_tensor(f"blk.{layer}.{tensor}.weight") else otherwise
        for layer in range(config["num_hidden_layers"])
    ]


def rows_of(tensor: str) -> Read:
    """How many rows a tensor of the first layer has."""
    return lambda data, config: data.shape(f"blk.0.{tensor}.weight")[-2:][0]


def queries_and_keys(order: Callable[[int, int, Config], Tensor]) -> Rules:
    """Rules of rows in another order, given the number of heads and the size of each."""

    def rule(heads: str) -> Rule:
        def rows(config: Config, count: int) -> Tensor | None:
            number, head_dim = config[heads], config["head_dim"]
            return None if count != number * head_dim or head_dim % 2 else order(number, head_dim, config)

        return Rule(rows=rows)

    return {"attn_q": rule("num_attention_heads"), "attn_k": rule("num_key_value_heads")}


# Neighbours are rotated together in llama.cpp, in Llama and its kin.
PERMUTED = queries_and_keys(lambda heads, head_dim, config: deinterleaved(heads, head_dim, head_dim))


# Gate and up of experts are side by side in transformers.
JOINT_EXPERTS: Rules = {"ffn_gate_exps": Rule(parts=("ffn_up_exps",))}


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
    if data.has("rope.dimension_sections"):
        rope["mrope_section"] = data.wholes("rope.dimension_sections", 3)
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
        rope |= {"rope_type": "yarn", "factor": factor}
        rope["original_max_position_embeddings"] = data.whole("rope.scaling.original_context_length")
        betas = [name for name in ("beta_fast", "beta_slow") if data.has(f"rope.scaling.yarn_{name}")]
        return rope | {name: data.number(f"rope.scaling.yarn_{name}") for name in betas}
    if scaling not in ("none", "linear", "longrope"):
        raise data.refused(f"scales rotary positions as {scaling[:40]!r}, which is not read")
    return rope


def read_layer_types(data: Metadata, config: Config, period: int) -> list[str]:
    """Which layers have windows, by the flags of the file, or all but the last of so many."""
    layers = config["num_hidden_layers"]
    flags = data.flags("attention.sliding_window_pattern", layers)
    if flags is None:
        flags = [(number + 1) % period > 0 for number in range(layers)]
    return ["sliding_attention" if flag else "full_attention" for flag in flags]


def mixture(count: str, top_k: str = "num_experts_per_tok", size: str = "") -> Read:
    """The number of experts and of those that a token has, and the width of each, under the names of a family."""

    def read(data: Metadata, config: Config) -> Config:
        experts, used = data.whole("expert_count"), data.whole("expert_used_count")
        shapes = data.shapes("ffn_down_exps.weight")
        if any(len(shape) != 3 or shape[0] != experts for shape in shapes) or not shapes:
            raise data.refused(f"claims to have {experts} experts, and its tensors differ")
        if not 1 <= used <= experts <= architecture.MAX_EXPERTS:
            raise data.refused(f"claims to have {experts} experts, of which a token has {used}")
        return {count: experts, top_k: used} | ({size: expert_size(data)} if size else {})

    return read


def window(data: Metadata, config: Config) -> int:
    return data.whole("attention.sliding_window")


def windows(period: int) -> dict[str, Read]:
    return {"sliding_window": window, "layer_types": partial(read_layer_types, period=period)}


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
