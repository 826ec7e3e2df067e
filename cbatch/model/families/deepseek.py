"""Multi-head latent attention (DeepSeek V2): keys and values of all heads come from a latent of a few numbers."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from cbatch.model.families.builder import Builder, HeadSizes, Layer, NormKind, deinterleaved, rows_of
from cbatch.model.families.decoder import Part, attention, decoder, family, feed_forward, mixture
from cbatch.model.families.experts import biased_router
from cbatch.model.families.rotary import read_rotary, rope_settings, yarn_mscale
from cbatch.model.ops.all import Gather, Linear, Normalize


def _latent_attention(
    model: Builder, *, part: float | None = None, is_interleaved: bool = True, factor: float = 1.0
) -> Part:
    """Also reads the norm and the activation of the model.  part: see `read_rotary`. YaRN makes scores larger."""
    model.norm, model.activation = NormKind(model.config["rms_norm_eps"]), model.read_activation()
    config, hidden, norm, prefix = model.config, model.hidden_size, NormKind(1e-6), "self_attn."
    heads, latent, rank = config.whole("num_attention_heads"), config.whole("kv_lora_rank"), config.get("q_lora_rank")
    plain, rotated = config.whole("qk_nope_head_dim"), config.whole("qk_rope_head_dim")
    value_dim = int(config.get("v_head_dim") or hidden // heads)
    width, each, bias = plain + rotated, plain + value_dim, config.flag("attention_bias")
    config.ignore("head_dim", "num_key_value_heads")
    rope, scale = rope_settings(config), width**-0.5
    turn = read_rotary(config, rotated, part=part, aliases={"deepseek_yarn": "yarn"})
    if model.kind == "mistral4":  # whose share is that of a whole head; queries grow with the position
        turn = read_rotary(config, rotated, settings=rope | {"partial_rotary_factor": 1.0})
        floor = float(rope["original_max_position_embeddings"])
        turn = replace(turn, scale_beta=float(rope["llama_4_scaling_beta"]), scale_floor=floor)
    rotary = model.add_rotary(turn)
    kind, all_dims = rope.get("rope_type", rope.get("type", "default")), rope.get("mscale_all_dim")
    if kind != "default" and all_dims:
        scale = float(scale * yarn_mscale(rope["factor"], all_dims) ** 2)
    sizes = HeadSizes(heads, heads, width, value_dim, rotated)
    # Rotated numbers come first in a head here, and last in the files.
    within = torch.cat([torch.arange(plain, width), torch.arange(plain)])
    if is_interleaved:
        within = within[deinterleaved(1, width, rotated)]
    rows = (torch.arange(heads)[:, None] * width + within).flatten()
    columns = _columns(heads, plain, rotated, value_dim, latent)
    attend = attention(
        sizes=sizes, rotary=[rotary] * model.num_layers, scale=scale, out_bias=bias, factor=factor, is_ready=True
    )

    def add(layer: Layer, source: str) -> None:
        def normed(name: str, source: str, target: str, size: int) -> None:
            model.add(Normalize(source, target, layer.norm_of(prefix + name, size, norm), width=size))

        queries, depth, name = source, hidden, "q_proj"
        if rank is not None:
            first = layer.matrix(prefix + "q_a_proj", int(rank), hidden, bias=bias)
            model.add(Linear(source, "query_latent", first))
            normed("q_a_layernorm", "query_latent", "query_input", int(rank))
            queries, depth, name = "query_input", int(rank), "q_b_proj"
        model.add(Linear(queries, "queries", rows_of(layer.matrix(prefix + name, heads * width, depth), rows)))
        down = layer.matrix(prefix + "kv_a_proj_with_mqa", latent + rotated, hidden, bias=bias)
        if is_interleaved:
            down = rows_of(down, torch.cat([torch.arange(latent), latent + deinterleaved(1, rotated, rotated)]))
        model.add(Linear(source, "latent", down))
        normed("kv_a_layernorm", "latent", "latent_input", latent)
        model.add(Linear("latent_input", "keys_values", layer.matrix(prefix + "kv_b_proj", heads * each, latent)))
        model.add(Gather(("queries", "latent", "keys_values"), "qkv", columns))
        attend(layer, "qkv")

    return add


def _columns(heads: int, plain: int, rotated: int, value_dim: int, latent: int) -> Tensor:
    """Where queries, keys and values come from: columns of queries, latent, and keys with values, side by side."""
    width, each, head = plain + rotated, plain + value_dim, torch.arange(heads)[:, None]
    shared = (heads * width + latent + torch.arange(rotated)).expand(heads, -1)
    start = heads * width + latent + rotated + head * each
    keys = torch.cat([shared, start + torch.arange(plain)], dim=1)
    values = start + plain + torch.arange(value_dim)
    return torch.cat([torch.arange(heads * width), keys.flatten(), values.flatten()])


@family("deepseek_v2")
def deepseek_v2(model: Builder) -> None:
    """Experts by softmax, whose weights are not normalised."""
    config = model.config
    attend, bias = _latent_attention(model), config.flag("mlp_bias")
    grouped = config.expect("topk_method", "greedy", "group_limited_greedy") == "group_limited_greedy"
    groups, top_groups = (config.whole("n_group"), config.whole("topk_group")) if grouped else (1, 1)
    config.ignore("n_group", "topk_group", "intermediate_size")
    router = {"scores": "softmax", "groups": groups, "top_groups": top_groups,
              "factor": config.number("routed_scaling_factor")}  # fmt: skip
    dense = config.whole("first_k_dense_replace")
    feed = mixture(
        model, router, num_shared=int(config.get("n_shared_experts") or 0), shared_bias=bias,
        sparse=[i >= dense for i in model.numbers], dense=feed_forward(bias=bias),
    )  # fmt: skip
    decoder(model, attend, feed)


_INDEXED = "deepseek_v32", "glm_moe_dsa"


@family("deepseek_v3", "kimi_k2", "sarvam_mla", "glm4_moe_lite", "axk1", "mistral4", *_INDEXED)
def deepseek_v3(model: Builder) -> None:
    """Experts by sigmoids, in groups. A.X K1 norms what they give. Kimi K2 and Sarvam differ in sizes only.

    DeepSeek V3.2 and GLM 5 attend to tokens that an index chooses, which are all in a text of no more than these.
    """
    config, kind = model.config, model.kind
    is_interleaved = config.flag("rope_interleave") or kind in _INDEXED
    attend = _latent_attention(model, part=1.0 if kind == "glm4_moe_lite" else None, is_interleaved=is_interleaved)
    if kind in _INDEXED:
        config.ignore(
            "index_head_dim", "index_n_heads", "index_topk_freq", "index_topk_pattern", "indexer_types",
            "index_skip_topk_offset", "layer_types",
        )  # fmt: skip
        end_where_index_chooses(model, config.whole("index_topk"))
    config.ignore("intermediate_size")
    model.spare.append(rf"model\.layers\.{model.num_layers}\..*")
    router = biased_router(config) | ({"scores": "softmax", "choice_bias": ""} if kind == "mistral4" else {})
    feed = mixture(
        model, router, num_shared=int(config.first("n_shared_experts", "num_shared_experts")),
        sparse=_sparse_layers(model), dense=feed_forward(), after="post_mlp_layernorm" if kind == "axk1" else "",
    )  # fmt: skip
    decoder(model, attend, feed)


def end_where_index_chooses(
    model: Builder, most: int, *, others: str = "--attention reference runs longer ones."
) -> None:
    """Ends contexts after the `most` tokens of which an index chooses all. others: how texts of more tokens are run"""
    model.spare.append(r".*\.self_attn\.indexer\..*")
    if most < model.max_model_len:
        model.max_model_len = most
        model.notes.append(
            f"A text has {most} tokens at most, because in longer ones an index chooses what this model attends to. "
            f"{others}".strip()
        )


def _sparse_layers(model: Builder) -> list[bool]:
    config, kind = model.config, model.kind
    config.ignore("first_k_dense_replace", "moe_layer_freq")
    if kind in ("glm4_moe_lite", "axk1", *_INDEXED) and config.get("mlp_layer_types"):
        return model.sparse_by_type(())
    dense = 1 if kind == "glm4_moe_lite" else config.whole("first_k_dense_replace")
    period = config.whole("moe_layer_freq") if kind == "axk1" else 1
    return [layer >= dense and layer % period == 0 for layer in model.numbers]


@family("minicpm3", "youtu")
def minicpm3(model: Builder) -> None:
    """Without experts. MiniCPM scales embedding, residual and logits."""
    config, is_minicpm = model.config, model.kind == "minicpm3"
    factor = logits = embedding = 1.0
    if is_minicpm:
        depth = config.get("scale_depth")
        factor = 1.0 if depth is None else float(depth) / model.num_layers**0.5
        embedding = config.number("scale_emb")
        logits = float(config.get("dim_model_base") or model.hidden_size) / model.hidden_size
    is_interleaved = not is_minicpm and config.flag("rope_interleave")
    attend = _latent_attention(model, is_interleaved=is_interleaved, factor=factor)
    feed = feed_forward(bias=is_minicpm and config.flag("mlp_bias"), factor=factor)
    decoder(model, attend, feed, scale=embedding, factor=logits)
