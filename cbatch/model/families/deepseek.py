"""Multi-head latent attention."""

from __future__ import annotations

from cbatch.model.config import UnsupportedConfig
from cbatch.model.families.builder import Builder, Layer, NormKind
from cbatch.model.families.decoder import Part, decoder, family, feed_forward, sparse_by_type
from cbatch.model.families.experts import add_biased_experts, num_experts
from cbatch.model.families.rotary import read_rotary, rope_settings, yarn_mscale
from cbatch.model.ops.all import RESIDUAL


def _latent_attention(
    model: Builder, *, part: float | None = None, is_interleaved: bool = True, factor: float = 1.0
) -> Part:
    """part: see `read_rotary`. YaRN makes scores larger."""
    config = model.config
    rotary = model.rotary(read_rotary(config, config.whole("qk_rope_head_dim"), part=part))
    scale = (config.whole("qk_nope_head_dim") + config.whole("qk_rope_head_dim")) ** -0.5
    rope = rope_settings(config, None, 1e4, "rope_theta", None)
    kind, all_dims = rope.get("rope_type", rope.get("type", "default")), rope.get("mscale_all_dim")
    if kind != "default" and all_dims:
        scale = float(scale * yarn_mscale(rope["factor"], all_dims) ** 2)
    bias = config.flag("attention_bias")

    def attend(layer: Layer, source: str) -> None:
        layer.mla(source, scale=scale, rotary=rotary, is_interleaved=is_interleaved, bias=bias, factor=factor)

    return attend


@family("deepseek_v2")
def deepseek_v2(model: Builder) -> None:
    """Experts by softmax, whose weights are not normalised."""
    config, norm = model.config, NormKind(model.config["rms_norm_eps"])
    attend, mlp_bias = _latent_attention(model), config.flag("mlp_bias")
    activation, size = model.activation("hidden_act", default="silu"), config.whole("moe_intermediate_size")
    experts, shared = num_experts(config, "n_routed_experts"), int(config.get("n_shared_experts") or 0)
    grouped = config.expect("topk_method", "greedy", "group_limited_greedy") == "group_limited_greedy"
    groups, top_groups = (config.whole("n_group"), config.whole("topk_group")) if grouped else (1, 1)
    config.ignore(
        "n_group", "topk_group", "norm_topk_prob", "scoring_func", "moe_layer_freq", "ep_size", "intermediate_size"
    )
    dense, mlp = config.whole("first_k_dense_replace", 0), feed_forward(activation, bias=mlp_bias)

    def feed(layer: Layer, source: str) -> None:
        if layer.number < dense:
            mlp(layer, source)
            return
        layer.route(
            source, experts, top_k=config.whole("num_experts_per_tok"), scores="softmax", groups=groups,
            top_groups=top_groups, factor=config.number("routed_scaling_factor", 1.0),
        )  # fmt: skip
        layer.experts(source, experts, size, activation)
        if shared:
            layer.feed_forward(source, shared * size, activation, prefix="mlp.shared_experts.", bias=mlp_bias)

    decoder(model, norm, attend, feed)


@family("deepseek_v3", "glm4_moe_lite", "axk1")
def deepseek_v3(model: Builder) -> None:
    """Experts by sigmoids, in groups. A.X K1 norms what they give."""
    config, kind = model.config, model.config.kind
    norm = NormKind(config["rms_norm_eps"])
    attend = _latent_attention(
        model, part=1.0 if kind == "glm4_moe_lite" else None, is_interleaved=config.flag("rope_interleave", True)
    )
    activation, size = model.activation("hidden_act", default="silu"), config.whole("moe_intermediate_size")
    experts, shared = num_experts(config, "n_routed_experts"), config.whole("n_shared_experts")
    config.expect("topk_method", "noaux_tc", "greedy", None)
    config.ignore("num_mtp_layers", "num_nextn_predict_layers", "scoring_func", "ep_size", "intermediate_size")
    model.spare.append(rf"model\.layers\.{model.num_layers}\..*")
    is_sparse, mlp = _sparse_layers(model), feed_forward(activation)
    target = "added" if kind == "axk1" else RESIDUAL

    def feed(layer: Layer, source: str) -> None:
        if not is_sparse[layer.number]:
            mlp(layer, source)
            return
        add_biased_experts(layer, source, experts, size, shared, activation, "mlp.gate.e_score_correction_bias", target)
        if kind == "axk1":
            layer.add_normed(layer.post_norm(norm, "post_mlp_layernorm"))

    decoder(model, norm, attend, feed)


def _sparse_layers(model: Builder) -> list[bool]:
    config, kind = model.config, model.config.kind
    if kind != "deepseek_v3" and (kinds := config.get("mlp_layer_types")):
        return sparse_by_type(kinds)
    default = 3 if kind == "deepseek_v3" else 1
    dense = 1 if kind == "glm4_moe_lite" else config.whole("first_k_dense_replace", default)
    period = config.whole("moe_layer_freq", 1)
    if kind != "axk1" and period != 1:
        raise UnsupportedConfig(f"its moe_layer_freq is {period}")
    config.ignore("first_k_dense_replace")
    return [layer >= dense and layer % period == 0 for layer in model.numbers]


@family("minicpm3", "youtu")
def minicpm3(model: Builder) -> None:
    """Without experts. MiniCPM scales embedding, residual and logits."""
    config, is_minicpm = model.config, model.config.kind == "minicpm3"
    norm, hidden = NormKind(config["rms_norm_eps"]), model.hidden_size
    factor = logits = embedding = 1.0
    if is_minicpm:
        depth = config.get("scale_depth", 1.4)
        factor = 1.0 if depth is None else float(depth) / model.num_layers**0.5
        embedding = config.number("scale_emb", 12)
        logits = float(config.get("dim_model_base", 256) or hidden) / hidden
    is_interleaved = not is_minicpm and config.flag("rope_interleave", True)
    attend = _latent_attention(model, is_interleaved=is_interleaved, factor=factor)
    mlp_bias = is_minicpm and config.flag("mlp_bias")
    feed = feed_forward(model.activation("hidden_act", default="silu"), bias=mlp_bias, factor=factor)
    decoder(model, norm, attend, feed, scale=embedding, tied_by_default=True, factor=logits)
