"""Mixtures of experts that are otherwise of Llama's kind."""

from __future__ import annotations

from typing import Any

from cbatch.model.config import ConfigReader, UnsupportedConfig
from cbatch.model.families.builder import STACKED, Builder, HeadSizes, Layer, NormKind
from cbatch.model.families.decoder import (
    Part,
    attention,
    decoder,
    every,
    family,
    feed_forward,
    head_norms,
    read_common,
    row_norms,
    sinks,
    sparse_by_type,
)
from cbatch.model.families.gemma import WITH_PICTURES
from cbatch.model.families.llama import hunyuan_attention
from cbatch.model.families.rotary import read_rotary
from cbatch.model.ops.all import RESIDUAL, Activation, Gate, Linear, Rotary


def biased_router(config: ConfigReader) -> dict[str, Any]:
    """DeepSeek V3's: sigmoids, a bias for the choice, and groups of experts, of which the best are used."""
    return {
        "top_k": config.whole("num_experts_per_tok"),
        "scores": "sigmoid",
        "groups": int(config.get("n_group") or 1),
        "top_groups": int(config.get("topk_group") or 1),
        "group_score": "two_highest",
        "normalize": config.flag("norm_topk_prob", True),
        "epsilon": 1e-20,
        "factor": float(config.get("routed_scaling_factor") or 1.0),
    }


def sparse_layers(config: ConfigReader, layers: int) -> list[bool]:
    """Which layers have experts, as Qwen says it."""
    period, dense = config.whole("decoder_sparse_step", 1), config.get("mlp_only_layers") or []
    return [layer not in dense and (layer + 1) % period == 0 for layer in range(layers)]


def num_experts(config: ConfigReader, *keys: str) -> int:
    return int(config.first(*keys, "num_experts", "num_local_experts"))


@family("mixtral", "minimax_m2")
def mixtral(model: Builder) -> None:
    """MiniMax has norms of all queries together, rotates a part of each head, and has sigmoids in its router."""
    config, is_mixtral = model.config, model.config.kind == "mixtral"
    norm, sizes = NormKind(config["rms_norm_eps"]), model.head_sizes()
    part = None
    if not is_mixtral:
        part = float(config.get("rotary_dim") or sizes.head_dim) / sizes.head_dim
        config.ignore("scoring_func", "use_routing_bias", "use_qk_norm", "qk_norm_type", "attn_type_list", "use_mtp",
                      "num_mtp_modules", "mtp_transformer_layers", "shared_intermediate_size")  # fmt: skip
    rotary = model.rotary(read_rotary(config, sizes.head_dim, theta=1e6 if is_mixtral else 5e6, part=part))
    activation, experts = model.activation("hidden_act", default="silu"), num_experts(config)
    window = int(config.get("sliding_window") or 0) if is_mixtral else 0
    prefix, names = "block_sparse_moe.", ("w1", "w3", "w2")
    norms = None if is_mixtral else row_norms(norm, sizes)
    attend = attention(sizes, rotary=rotary, window=window, norms=norms)

    def feed(layer: Layer, source: str) -> None:
        bias = None if is_mixtral else layer.weight(prefix + "e_score_correction_bias", experts)
        layer.route(
            source, experts, prefix + "gate", top_k=config.whole("num_experts_per_tok"), choice_bias=bias,
            scores="softmax" if is_mixtral else "sigmoid", normalize=True,
        )  # fmt: skip
        layer.experts(source, experts, config["intermediate_size"], activation, prefix=prefix + "experts.", names=names)

    decoder(model, norm, attend, feed)


@family("qwen2_moe", "qwen3_moe", "olmoe", "flex_olmo", "mellum")
def qwen_moe(model: Builder) -> None:
    """Qwen 2 has a shared expert with a gate. OLMoE norms all queries together, FlexOlmo after each part, too."""
    config, kind = model.config, model.config.kind
    norm, sizes = NormKind(config["rms_norm_eps"]), model.head_sizes()
    is_olmo, is_post, is_qwen2 = "olmo" in kind, kind == "flex_olmo", kind == "qwen2_moe"
    bias = config.flag("qkv_bias" if is_qwen2 else "attention_bias", is_qwen2)
    windows, rotaries = _qwen_windows(model), _qwen_rotaries(model, sizes)
    activation, experts = model.activation("hidden_act", default="silu"), num_experts(config)
    size = config.whole("intermediate_size" if is_olmo else "moe_intermediate_size")
    config.ignore("intermediate_size")
    top_k, normalize = config.whole("num_experts_per_tok"), config.flag("norm_topk_prob", kind == "mellum")
    is_sparse = [True] * model.num_layers if is_olmo else sparse_layers(config, model.num_layers)
    if kind == "mellum":
        is_sparse = sparse_by_type(config.get("mlp_layer_types") or ["sparse"] * model.num_layers)
        model.spare.append(r"mtp\..*")
        config.ignore("num_mtp_layers", "num_nextn_predict_layers")
    clip, mlp = float(config.get("clip_qkv") or 0.0) if kind == "olmoe" else 0.0, feed_forward(activation)

    norms = row_norms(norm, sizes) if is_olmo else head_norms(norm, sizes)
    attend = attention(
        sizes, qkv_bias=bias, out_bias=bias and not is_qwen2, rotary=rotaries, window=windows,
        norms=None if is_qwen2 else norms, clip=clip,
        after=(norm, "post_attention_layernorm" if is_post else ""),
    )  # fmt: skip

    def feed(layer: Layer, source: str) -> None:
        if not is_sparse[layer.number]:
            mlp(layer, source)
            return
        layer.route(source, experts, top_k=top_k, scores="softmax", normalize=normalize)
        layer.experts(source, experts, size, activation, target="added" if is_post else RESIDUAL)
        if is_post:
            layer.add_normed(layer.post_norm(norm, "post_feedforward_layernorm"))
        if is_qwen2:
            add_gated_shared_expert(layer, source, activation)

    decoder(model, norm, attend, feed, norms=("", "") if is_post else ("input_layernorm", "post_attention_layernorm"))


def add_gated_shared_expert(layer: Layer, source: str, activation: Activation) -> None:
    """The gate multiplies what goes into the last linear, which is the same."""
    model, size = layer.model, layer.model.config.whole("shared_expert_intermediate_size")
    names = [f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")]
    up = layer.matrix(names[:2], [size, size], model.hidden_size)
    model.add(Linear(source, "shared", up, activation=activation))
    model.add(Linear(source, "shared_gate", layer.matrix("mlp.shared_expert_gate", 1, model.hidden_size)))
    model.add(Gate("shared_gate", "shared", width=size))
    layer.add_to_residual("shared", layer.matrix(names[2], model.hidden_size, size))


def _qwen_windows(model: Builder) -> list[int]:
    config, kind = model.config, model.config.kind
    if kind == "mellum":
        return model.windows()
    config.ignore("sliding_window", "max_window_layers")
    if not config.flag("use_sliding_window") or "olmo" in kind:
        config.ignore("layer_types")
        return [0] * model.num_layers
    window = int(config.get("sliding_window") or 0)
    if kind == "qwen3_moe":
        return [window] * model.num_layers
    last = config.whole("max_window_layers", 28)
    kinds = ["sliding_attention" if (i + 1) % 2 and i < last else "full_attention" for i in model.numbers]
    return model.windows(kinds, window=window)


def _qwen_rotaries(model: Builder, sizes: HeadSizes) -> list[int]:
    config = model.config
    if config.kind != "mellum":
        theta = 5e5 if config.kind == "flex_olmo" else 1e4
        return [model.rotary(read_rotary(config, sizes.head_dim, theta=theta))] * model.num_layers
    return [
        model.rotary(read_rotary(config, sizes.head_dim, layer_type=kind))
        for kind in model.layer_types(["full_attention"] * model.num_layers)
    ]


@family("gpt_oss")
def gpt_oss(model: Builder) -> None:
    """Sinks, windows in every other layer, and clipped activations; gate and up take turns in their matrix."""
    config = model.config
    norm, sizes = NormKind(config["rms_norm_eps"]), model.head_sizes()
    yarn = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096, "partial_rotary_factor": 1.0}  # fmt: skip
    is_given = config.get("rope_parameters") or config.get("rope_scaling")
    config.ignore("rope_theta", "initial_context_length", "hidden_act", "experts_per_token")
    rotary = model.rotary(read_rotary(config, sizes.head_dim, theta=150000.0, settings=None if is_given else yarn))
    windows = model.windows(every(2, model.num_layers), window=config.whole("sliding_window", 128))
    experts, inner = num_experts(config), config.whole("intermediate_size")
    limit, slope = config.number("swiglu_limit", 7.0), config.number("swiglu_alpha", 1.702)
    activation, bias = Activation("silu", limit=limit, slope=slope, up_offset=1.0), config.flag("attention_bias", True)
    attend = attention(sizes, bias=bias, rotary=rotary, window=windows, sinks=sinks(sizes))

    def feed(layer: Layer, source: str) -> None:
        top_k = config.whole("num_experts_per_tok")
        layer.route(source, experts, "mlp.router", bias=True, top_k=top_k, scores="softmax_of_chosen")
        layer.experts(
            source, experts, inner, activation, names=STACKED, stacked=True, transpose=True, bias=True,
            interleaved=True,
        )  # fmt: skip

    decoder(model, norm, attend, feed)


@family("ernie4_5_moe")
def ernie_moe(model: Builder) -> None:
    """A bias for the choice of experts, shared experts, and dense layers at the beginning."""
    config = model.config
    norm, sizes, rotary, activation = read_common(model, theta=5e5, is_interleaved=True)
    experts, size = num_experts(config, "moe_num_experts"), config.whole("moe_intermediate_size")
    first, last = config.whole("moe_layer_start_index", 1), config.whole("moe_layer_end_index", -1)
    last, period = (model.num_layers - 1 if last < 0 else last), config.whole("moe_layer_interval", 1)
    bias, shared = config.flag("use_bias"), config.whole("moe_num_shared_experts", 2)
    mlp = feed_forward(activation, bias=bias)
    model.spare.append(r".*mtp.*")

    def feed(layer: Layer, source: str) -> None:
        if not (first <= layer.number <= last and (layer.number + 1) % period == 0):
            mlp(layer, source)
            return
        layer.route(
            source, experts, top_k=int(config.first("moe_k", "num_experts_per_tok")), scores="softmax", normalize=True,
            choice_bias=layer.weight("mlp.moe_statics.e_score_correction_bias", 1, experts),
            least_sum=config.number("moe_norm_min", 1e-12),
        )  # fmt: skip
        layer.experts(source, experts, size, activation)
        if shared:
            layer.feed_forward(source, shared * size, activation, prefix="mlp.shared_experts.", bias=bias)

    attend = attention(sizes, bias=bias, rotary=rotary)
    decoder(model, norm, attend, feed, tied_by_default=True)


@family("glm4_moe", "dots1", "exaone_moe", "solar_open")
def biased_moe(model: Builder) -> None:
    """Llama's attention, and DeepSeek V3's experts after a few dense layers. EXAONE rotates only in its windows."""
    config, kind, is_exaone = model.config, model.config.kind, model.config.kind == "exaone_moe"
    norm, sizes, rotary, activation = read_common(model, part={"glm4_moe": 0.5, "solar_open": 1.0}.get(kind))
    bias = config.flag("attention_bias") and not is_exaone
    has_norms = kind in ("dots1", "exaone_moe") or (kind == "glm4_moe" and config.flag("use_qk_norm"))
    windows, size = _biased_windows(model), config.whole("moe_intermediate_size")
    experts = num_experts(config, "n_routed_experts")
    shared = int(config.first("n_shared_experts", "num_shared_experts"))
    dense = 0 if kind == "solar_open" else config.whole("first_k_dense_replace", 0 if kind == "dots1" else 1)
    kinds = config.get("mlp_layer_types") if is_exaone else None
    is_sparse = sparse_by_type(kinds) if kinds else [i >= dense for i in model.numbers]
    bias_name = "mlp.e_score_correction_bias" if is_exaone else "mlp.gate.e_score_correction_bias"
    config.ignore("num_mtp_layers", "num_nextn_predict_layers", "first_k_dense_replace", "scoring_func", "topk_method",
                  "intermediate_size")  # fmt: skip
    model.spare += [rf"model\.layers\.{model.num_layers}\..*", r"mtp\..*"]
    mlp = feed_forward(activation)
    attend = attention(
        sizes, qkv_bias=bias, out_bias=bias and kind == "dots1", window=windows,
        rotary=[rotary if not is_exaone or window or not any(windows) else None for window in windows],
        norms=head_norms(norm, sizes) if has_norms else None,
    )  # fmt: skip

    def feed(layer: Layer, source: str) -> None:
        if is_sparse[layer.number]:
            add_biased_experts(layer, source, experts, size, shared, activation, bias_name)
        else:
            mlp(layer, source)

    decoder(model, norm, attend, feed)


def add_biased_experts(
    layer: Layer, source: str, experts: int, size: int, shared: int, activation: Activation, bias_name: str,
    target: str = RESIDUAL,
) -> None:  # fmt: skip
    """Experts chosen by `biased_router`, and shared ones; added to the residual, or to another target."""
    bias = layer.weight(bias_name, experts)
    layer.route(source, experts, choice_bias=bias, **biased_router(layer.model.config))
    layer.experts(source, experts, size, activation, target=target)
    if shared:
        layer.feed_forward(source, shared * size, activation, prefix="mlp.shared_experts.", target=target)


def _biased_windows(model: Builder) -> list[int]:
    config, kind = model.config, model.config.kind
    if kind == "exaone_moe":
        kinds = every(config.whole("sliding_window_pattern", 4), model.num_layers)
        return model.windows(kinds, window=config.whole("sliding_window", 4096))
    if kind == "dots1":
        first = config.whole("max_window_layers", 62)
        is_windowed = config.get("sliding_window", 4096) is not None
        kinds = ["sliding_attention" if is_windowed and i >= first else "full_attention" for i in model.numbers]
        return model.windows(kinds, window=int(config.get("sliding_window", 4096) or 0))
    return [0] * model.num_layers


@family("hunyuan_v1_moe")
def hunyuan_moe(model: Builder) -> None:
    """HunYuan with experts in every layer, beside a shared one."""
    config = model.config
    norm = NormKind(config["rms_norm_eps"])
    attend = hunyuan_attention(model, norm)
    activation, experts = model.activation("hidden_act", default="silu"), num_experts(config)
    top_k, inner = config.first("moe_topk", "num_experts_per_tok"), config.whole("intermediate_size")
    if isinstance(top_k, list):
        if len(set(top_k)) != 1:
            raise UnsupportedConfig("its layers choose different numbers of experts")
        top_k = top_k[0]
    config.ignore("moe_intermediate_size", "num_shared_expert", "use_qk_norm", "eod_token_id")

    def feed(layer: Layer, source: str) -> None:
        layer.route(source, experts, "mlp.gate.wg", top_k=int(top_k), scores="softmax", normalize=True)
        layer.experts(source, experts, inner, activation)
        layer.feed_forward(source, inner, activation, prefix="mlp.shared_mlp.")

    decoder(model, norm, attend, feed)


@family("hy_v3")
def hy_v3(model: Builder) -> None:
    """Norms of queries and keys, and experts by sigmoids with a bias for the choice."""
    config = model.config
    norm, sizes, rotary, activation = read_common(model, eps=1e-5, theta=11158840.0)
    bias, mlp_bias, kinds = config.flag("attention_bias"), config.flag("mlp_bias"), config.get("mlp_layer_types")
    sparse = sparse_by_type(kinds) if kinds else [i >= 1 for i in model.numbers]
    shared, factor = config.whole("num_shared_experts", 1), config.number("router_scaling_factor", 2.826)
    attend = attention(sizes, bias=bias, rotary=rotary, norms=head_norms(norm, sizes))
    feed = _sigmoid_experts(model, activation, sparse, shared, factor, "mlp.shared_mlp.", bias=mlp_bias)
    decoder(model, norm, attend, feed)


@family("afmoe")
def afmoe(model: Builder) -> None:
    """HY 3 with norms on both sides and gates after attention; it rotates only in its windows."""
    config, hidden = model.config, model.hidden_size
    norm, sizes, rotary, activation = read_common(model, eps=1e-5)
    bias, kinds = config.flag("attention_bias"), every(config.whole("global_attn_every_n_layers", 4), model.num_layers)
    windows = model.windows(kinds, window=config.whole("sliding_window", 1024))
    dense, shared = config.whole("num_dense_layers", 1), config.whole("num_shared_experts", 2)
    sparse, factor = [i >= dense for i in model.numbers], config.number("route_scale", 1.0)
    part = _sigmoid_experts(model, activation, sparse, shared, factor, "mlp.shared_experts.", target="added")

    def attend(layer: Layer, source: str) -> None:
        gate, window = layer.matrix("self_attn.gate_proj", sizes.heads * sizes.head_dim, hidden), windows[layer.number]
        model.add(Linear(source, "gate", gate))
        layer.attention(
            source, sizes, qkv_bias=bias, out_bias=bias, rotary=rotary if window else None, window=window,
            gate=Gate("gate", "attended"), post_norm=layer.post_norm(norm, "post_attention_layernorm"),
            norms=layer.head_norms(norm, sizes),
        )  # fmt: skip

    def feed(layer: Layer, source: str) -> None:
        part(layer, source)
        layer.add_normed(layer.post_norm(norm, "post_mlp_layernorm"))

    scale = hidden**0.5 if config.flag("mup_enabled") else 1.0
    decoder(model, norm, attend, feed, scale=scale, norms=("input_layernorm", "pre_mlp_layernorm"))


def _sigmoid_experts(
    model: Builder, activation: Activation, sparse: list[bool], shared: int, factor: float, prefix: str, *,
    bias: bool = False, target: str = RESIDUAL,
) -> Part:  # fmt: skip
    """Experts, and `shared` ones with this prefix, in the layers that are sparse; a plain part in the others."""
    config, experts, size = model.config, num_experts(model.config), model.config.whole("moe_intermediate_size")
    config.ignore("first_k_dense_replace", "route_norm", "qk_norm", "score_func", "n_group", "topk_group",
                  "enable_moe_fp32_combine", "num_nextn_predict_layers", "load_balance_coeff", "num_expert_groups",
                  "num_limited_groups", "use_grouped_mm")  # fmt: skip
    model.spare.append(rf"model\.layers\.{model.num_layers}\..*")

    def feed(layer: Layer, source: str) -> None:
        if not sparse[layer.number]:
            inner = config.whole("intermediate_size")
            layer.feed_forward(source, inner, activation, bias=bias, target=target, add=target == RESIDUAL)
            return
        layer.route(
            source, experts, "mlp.router.gate", top_k=config.whole("num_experts_per_tok"), scores="sigmoid",
            choice_bias=layer.weight("mlp.expert_bias", experts), normalize=True, epsilon=1e-20, factor=factor,
        )  # fmt: skip
        layer.experts(source, experts, size, activation, target=target)
        layer.feed_forward(source, shared * size, activation, prefix=prefix, bias=bias, target=target)

    return feed


@family("llama4", "llama4_text")
def llama4(model: Builder) -> None:
    """Chunks where tokens are rotated; elsewhere queries grow with the position. Weights of experts multiply inputs."""
    config, prefix = model.config, "feed_forward."
    norm, sizes, rotary, activation = read_common(model, eps=1e-5, theta=5e5, is_interleaved=True)
    is_tuned, interval = config.flag("attn_temperature_tuning", True), config.whole("no_rope_layer_interval", 4)
    has_rope = config.get("no_rope_layers") or [(i + 1) % interval != 0 for i in model.numbers]
    chunk = config.whole("attention_chunk_size", 8192)
    kinds = config.get("layer_types") or ["chunked_attention" if one else "full_attention" for one in has_rope]
    if not set(kinds) <= {"chunked_attention", "full_attention"} or len(kinds) != model.num_layers:
        raise UnsupportedConfig("it has layers of other types")
    floor, beta = config.number("floor_scale", 8192), config.number("attn_scale", 0.1)
    scaled = model.rotary(Rotary((), scale_beta=beta, scale_floor=floor, scale_shift=1)) if is_tuned else None
    bias, step = config.flag("attention_bias"), config.whole("interleave_moe_layer_step", 1)
    sparse = config.get("moe_layers")
    sparse = set(range(step - 1, model.num_layers, step) if sparse is None else sparse)
    experts, inner = num_experts(config), config.whole("intermediate_size")
    head_norm, has_norms = NormKind(norm.eps, has_weight=False), config.flag("use_qk_norm", True)
    config.ignore("for_llm_compressor", "intermediate_size_mlp")
    model.layouts = WITH_PICTURES
    model.spare.append(r"(model\.)?(vision_model|multi_modal_projector)\..*")
    norms = head_norms(head_norm, sizes, last=True)
    attend = attention(
        sizes, bias=bias, chunk=[chunk if kind == "chunked_attention" else 0 for kind in kinds],
        rotary=[rotary if has_rope[i] else scaled for i in model.numbers],
        norms=lambda layer: norms(layer) if has_norms and has_rope[layer.number] else None,
    )  # fmt: skip

    def feed(layer: Layer, source: str) -> None:
        if layer.number not in sparse:
            layer.feed_forward(source, config["intermediate_size_mlp"], activation, prefix=prefix)
            return
        top_k = config.whole("num_experts_per_tok")
        layer.route(source, experts, prefix + "router", top_k=top_k, scores="sigmoid_of_chosen")
        layer.experts(
            source, experts, inner, activation, prefix=prefix + "experts.", names=STACKED, stacked=True, transpose=True,
            weigh_input=True,
        )  # fmt: skip
        layer.feed_forward(source, inner, activation, prefix=prefix + "shared_expert.")

    decoder(model, norm, attend, feed)
