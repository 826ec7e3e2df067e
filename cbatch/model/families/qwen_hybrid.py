"""Qwen 3.5 and Qwen 3 Next: gated delta nets, and in every fourth layer attention with a gate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from cbatch.model.config import ConfigReader
from cbatch.model.families.builder import Builder, HeadSizes, Layer, NormKind, rows_of
from cbatch.model.families.decoder import family
from cbatch.model.families.experts import add_gated_shared_expert, num_experts, sparse_layers
from cbatch.model.families.mixers import DeltaSizes, gated_delta_net
from cbatch.model.families.rotary import read_rotary
from cbatch.model.ops.all import Activation, Gate, Linear, Matrix


@family("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
def qwen_hybrid(model: Builder) -> None:
    """Norms have weights around 0, but for those of the delta nets. Text needs none of the positions for pictures."""
    config, kind = model.config, model.config.kind
    norm, is_dense = NormKind(config.get("rms_norm_eps", 1e-6), offset=1.0), kind in ("qwen3_5", "qwen3_5_text")
    kv_heads = config.whole("num_key_value_heads", 4 if is_dense else 2)
    heads, delta = model.head_sizes(kv_heads=kv_heads, head_dim=256), _delta_sizes(config)
    rotary = model.rotary(read_rotary(config, heads.head_dim, part=0.25))
    activation = Activation("silu")
    config.expect("hidden_act", "silu")  # also after the convolutions
    bias, interval = config.flag("attention_bias"), config.whole("full_attention_interval", 4)
    kinds = ["full_attention" if (i + 1) % interval == 0 else "linear_attention" for i in model.numbers]
    kinds = model.layer_types(kinds, ("full_attention", "linear_attention"))
    is_sparse = [not is_dense] * model.num_layers if kind != "qwen3_next" else _sparse_layers(config, model.num_layers)
    config.expect("attn_output_gate", True)
    config.expect("mamba_ssm_dtype", "float32")
    config.ignore("image_token_id", "video_token_id", "mtp_num_hidden_layers", "mtp_use_dedicated_embeddings",
                  "intermediate_size")  # fmt: skip
    model.layouts = ((("model.", "model.language_model."),),)
    model.spare += [r"(model\.)?visual\..*", r"mtp\..*"]
    model.embed()
    for layer, layer_type in zip(model.layers(), kinds, strict=True):
        source = layer.norm(norm, "input_layernorm")
        if layer_type == "full_attention":
            _gated_attention(layer, source, heads, norm, rotary, bias=bias)
        else:
            mixed, controls = _interleaved(layer, delta) if kind == "qwen3_next" else _side_by_side(layer, delta)
            gated_delta_net(layer, source, delta, mixed, controls, norm.eps, "linear_attn.")
        source = layer.norm(norm, "post_attention_layernorm")
        if not is_sparse[layer.number]:
            layer.feed_forward(source, config["intermediate_size"], activation)
            continue
        experts, size = num_experts(config), config.whole("moe_intermediate_size")
        layer.route(source, experts, **_router(config))
        layer.experts(source, experts, size, activation)
        add_gated_shared_expert(layer, source, activation)
    model.head(norm("model.norm", model.hidden_size))


def _router(config: ConfigReader) -> dict[str, Any]:
    normalize = config.flag("norm_topk_prob", True) if config.kind == "qwen3_next" else True
    return {"top_k": config.whole("num_experts_per_tok"), "scores": "softmax", "normalize": normalize}


def _sparse_layers(config: ConfigReader, layers: int) -> list[bool]:
    return [one and num_experts(config) > 0 for one in sparse_layers(config, layers)]


def _delta_sizes(config: ConfigReader) -> DeltaSizes:
    keys = ("num_key_heads", "num_value_heads", "key_head_dim", "value_head_dim", "conv_kernel_dim")
    defaults = (16, 32, 128, 128, 4)
    return DeltaSizes(*(int(config.get(f"linear_{key}", each)) for key, each in zip(keys, defaults, strict=True)))


def _gated_attention(layer: Layer, source: str, sizes: HeadSizes, norm: NormKind, rotary: int, *, bias: bool) -> None:
    """Each head of q_proj gives a query, and then a gate of what attention gives."""
    model, dim = layer.model, sizes.head_dim
    qkv = layer.matrix(
        [f"self_attn.{part}_proj" for part in "qkv"], [2 * sizes.columns[0], *sizes.columns[1:]], model.hidden_size,
        bias=bias,
    )  # fmt: skip
    start = 2 * dim * torch.arange(sizes.heads)[:, None] + torch.arange(dim)
    both = Matrix(qkv.parts[:1], qkv.biases[:1])
    gates, queries = rows_of(both, (start + dim).flatten()), rows_of(both, start.flatten())
    qkv = Matrix(queries.parts + qkv.parts[1:], queries.biases + qkv.biases[1:])
    model.add(Linear(source, "gate", gates))
    layer.attention(
        source, sizes, qkv=qkv, out_bias=bias, rotary=rotary, gate=Gate("gate", "attended"),
        norms=layer.head_norms(norm, sizes),
    )  # fmt: skip


def _side_by_side(layer: Layer, sizes: DeltaSizes) -> tuple[Matrix, Matrix]:
    """Of Qwen 3.5: queries, keys and values, then gates; and what controls the state."""
    hidden, names = layer.model.hidden_size, [f"linear_attn.in_proj_{part}" for part in ("qkv", "z", "b", "a")]
    mixed = layer.matrix(names[:2], [2 * sizes.keys + sizes.values, sizes.values], hidden)
    return mixed, layer.matrix(names[2:], [sizes.value_heads] * 2, hidden)


def _interleaved(layer: Layer, sizes: DeltaSizes) -> tuple[Matrix, Matrix]:
    """Of Qwen 3 Next: a head of keys and the heads of values that it serves lie together."""
    hidden, shared = layer.model.hidden_size, sizes.value_heads // sizes.key_heads
    values = shared * sizes.value_dim
    mixed = layer.matrix("linear_attn.in_proj_qkvz", 2 * (sizes.keys + sizes.values), hidden)
    controls = layer.matrix("linear_attn.in_proj_ba", 2 * sizes.value_heads, hidden)
    order = _gathered(sizes.key_heads, [sizes.key_dim, sizes.key_dim, values, values])
    return rows_of(mixed, order), rows_of(controls, _gathered(sizes.key_heads, [shared, shared]))


def _gathered(groups: int, widths: list[int]) -> Tensor:
    """The order of rows that brings parts together which each of the groups has."""
    parts = torch.split(torch.arange(groups * sum(widths)).view(groups, -1), widths, dim=1)
    return torch.cat([part.flatten() for part in parts])
