"""Facts in the config of a transformers model: kinds of layers, context, and the cost of a step."""

from __future__ import annotations

from typing import Any

from torch import nn

from cbatch.base.errors import ModelError
from cbatch.model.base import ALL_EXPERTS_READ, LinearCost
from cbatch.model.hf.attention_calls import MaskPattern
from cbatch.model.hf.recurrent import StateLayout

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


def attention_kinds(config: Any) -> list[str]:
    """Which tokens the layers see that attend, as far as the config says; without recurrent and feed-forward layers."""
    kinds = getattr(config, "layer_types", None) or ()
    return [ATTENTION_LAYERS[kind] for kind in kinds if kind in ATTENTION_LAYERS]


def chunk_multiple(config: Any, states: StateLayout) -> int:
    """How many tokens its recurrent layers take together."""
    if all(kind == "conv" for _, kind, _ in states.numbers):
        return 1
    sizes = (getattr(config, name, None) for name in ("mamba_chunk_size", "chunk_size", "block_size"))
    return next((size for size in sizes if isinstance(size, int) and size > 0), DEFAULT_CHUNK)


def max_model_len(config: Any) -> int:
    names = "max_position_embeddings n_positions max_target_positions max_sequence_length max_seq_len seq_length"
    lengths = (getattr(config, name, None) for name in names.split())
    longest = next((length for length in lengths if isinstance(length, int) and length > 0), 2048)
    rope = getattr(config, "rope_parameters", None) or {}
    is_by_layer_type = rope and all(isinstance(value, dict) for value in rope.values())
    for parameters in rope.values() if is_by_layer_type else [rope]:
        # Once the longest text of a batch passes this length, the encoding of every token changes.
        switch = parameters.get("original_max_position_embeddings")
        if parameters.get("rope_type") == "longrope" and isinstance(switch, int):
            longest = min(longest, switch)
    return longest


def check_config(config: Any, text_config: Any) -> None:
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


def check_patterns(config: Any, patterns: list[MaskPattern]) -> None:
    """Checks that the masks agree with the config, by which `generate` sizes its cache."""
    kinds = attention_kinds(config)
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


def linear_cost_of(network: Any, config: Any) -> LinearCost:
    """Matrices are all parameters of two dimensions or more, except embeddings, of which only rows are read.

    An embedding that is also the head counts once, as the head. Experts are all read in each step,
    and each token is multiplied with those that it chooses. Weights that are not parameters are not seen.
    """
    weight = getattr(network.get_output_embeddings(), "weight", None)
    head = weight if isinstance(weight, nn.Parameter) else None
    names = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
    experts = next((found for name in names if isinstance(found := getattr(config, name, None), int)), 0)
    chosen = getattr(config, "num_experts_per_tok", None) or getattr(config, "moe_topk", None)
    share = chosen / experts if experts and isinstance(chosen, int) else 1.0
    weight_bytes, parameters, in_experts = 0, 0.0, 0
    embeddings = {id(module.weight) for module in network.modules() if isinstance(module, nn.Embedding)}
    for parameter in network.parameters():  # each once, however many modules share it
        if parameter.dim() < 2 or (parameter is not head and id(parameter) in embeddings):
            continue
        weight_bytes += parameter.numel() * parameter.element_size()
        is_expert = experts > 1 and parameter.dim() == 3 and parameter.shape[0] == experts
        in_experts += is_expert
        if parameter is not head:
            parameters += parameter.numel() * (share if is_expert else 1)
    assumed = _assumed(network, head, experts, in_experts)
    return LinearCost(weight_bytes, parameters, head.numel() if head is not None else 0, assumed)


def _assumed(network: Any, head: nn.Parameter | None, experts: int, in_experts: int) -> tuple[str, ...]:
    notes = []
    if head is None:
        notes.append("The model does not say which weights are its output head, so they count for every token.")
    if experts > 1 and in_experts:
        notes.append(ALL_EXPERTS_READ)
    elif experts > 1:
        notes.append("The weights of experts could not be identified, so every token is assumed to use all of them.")
    if any(not parameter.dtype.is_floating_point for parameter in network.parameters()):
        notes.append("Some weights are not floating-point numbers; if several share a byte, they count as one.")
    return tuple(notes)
