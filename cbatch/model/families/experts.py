"""Mixtures of experts that are otherwise of Llama's kind."""

from __future__ import annotations

from typing import Any

from cbatch.model.config import ConfigReader, UnsupportedConfig
from cbatch.model.families.gemma import WITH_PICTURES
from cbatch.model.families.llama import hunyuan_rotary
from cbatch.model.families.registry import family
from cbatch.model.programs.builder import Builder, HeadSizes, Layer, NormKind
from cbatch.model.programs.program import RESIDUAL, Activation, Gate, HeadNorms, Linear
from cbatch.model.programs.rotary import read_rotary


def biased_router(config: ConfigReader, scale_key: str = "routed_scaling_factor") -> dict[str, Any]:
    """DeepSeek V3's: sigmoids, a bias for the choice, and groups of experts, of which the best are used."""
    return {
        "top_k": int(config["num_experts_per_tok"]),
        "scores": "sigmoid",
        "groups": int(config.get("n_group") or 1),
        "top_groups": int(config.get("topk_group") or 1),
        "group_score": "two_highest",
        "normalize": bool(config.get("norm_topk_prob", True)),
        "epsilon": 1e-20,
        "factor": float(config.get(scale_key) or 1.0),
    }


def sparse_layers(config: ConfigReader, layers: int) -> list[bool]:
    """Which layers have experts, as Qwen says it."""
    period, dense = int(config.get("decoder_sparse_step", 1)), config.get("mlp_only_layers") or []
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
    model.embed()
    for layer in model.layers():
        source = layer.norm(norm, "input_layernorm")
        norms = None if is_mixtral else layer.row_norms(norm, sizes)
        layer.attention(source, sizes, rotary=rotary, window=window, norms=norms)
        source = layer.norm(norm, "post_attention_layernorm")
        bias = None if is_mixtral else layer.weight(prefix + "e_score_correction_bias", experts)
        layer.route(
            source, experts, prefix + "gate", top_k=int(config["num_experts_per_tok"]), choice_bias=bias,
            scores="softmax" if is_mixtral else "sigmoid", normalize=True,
        )  # fmt: skip
        layer.experts(source, experts, config["intermediate_size"], activation, prefix=prefix + "experts.", names=names)
    model.head(norm("model.norm", model.hidden_size))


@family("qwen2_moe", "qwen3_moe", "olmoe", "flex_olmo", "mellum")
def qwen_moe(model: Builder) -> None:
    """Qwen 2 has a shared expert with a gate. OLMoE norms all queries together, FlexOlmo after each part, too."""
    config, kind = model.config, model.config.kind
    norm, sizes = NormKind(config["rms_norm_eps"]), model.head_sizes()
    is_olmo, is_post = "olmo" in kind, kind == "flex_olmo"
    bias = bool(config.get("qkv_bias" if kind == "qwen2_moe" else "attention_bias", kind == "qwen2_moe"))
    windows, rotaries = _qwen_windows(model), _qwen_rotaries(model, sizes)
    activation, experts = model.activation("hidden_act", default="silu"), num_experts(config)
    size = int(config["intermediate_size"] if is_olmo else config["moe_intermediate_size"])
    config.ignore("intermediate_size")
    router: dict[str, Any] = {
        "top_k": int(config["num_experts_per_tok"]), "scores": "softmax",
        "normalize": bool(config.get("norm_topk_prob", kind == "mellum")),
    }  # fmt: skip
    is_sparse = [True] * model.num_layers if is_olmo else sparse_layers(config, model.num_layers)
    if kind == "mellum":
        is_sparse = [one == "sparse" for one in config.get("mlp_layer_types") or ["sparse"] * model.num_layers]
        model.spare.append(r"mtp\..*")
        config.ignore("num_mtp_layers", "num_nextn_predict_layers")
    clip = float(config.get("clip_qkv") or 0.0) if kind == "olmoe" else 0.0
    model.embed()
    for layer, window, rotary in zip(model.layers(), windows, rotaries, strict=True):
        norms = layer.row_norms(norm, sizes) if is_olmo else layer.head_norms(norm, sizes)
        norms = norms if kind != "qwen2_moe" else HeadNorms()
        layer.attention(
            layer.unnormed() if is_post else layer.norm(norm, "input_layernorm"), sizes, qkv_bias=bias,
            out_bias=bias and kind != "qwen2_moe", rotary=rotary, window=window,
            post_norm=layer.post_norm(norm, "post_attention_layernorm") if is_post else None, norms=norms, clip=clip,
        )  # fmt: skip
        source = layer.unnormed() if is_post else layer.norm(norm, "post_attention_layernorm")
        if not is_sparse[layer.number]:
            layer.feed_forward(source, config["intermediate_size"], activation)
            continue
        layer.route(source, experts, **router)
        if is_post:
            layer.experts(source, experts, size, activation, target="added")
            layer.add_normed(layer.post_norm(norm, "post_feedforward_layernorm"))
            continue
        layer.experts(source, experts, size, activation)
        if kind == "qwen2_moe":
            add_gated_shared_expert(layer, source, activation)
    model.head(norm("model.norm", model.hidden_size))


def add_gated_shared_expert(layer: Layer, source: str, activation: Activation) -> None:
    """The gate multiplies what goes into the last linear, which is the same."""
    model, size = layer.model, int(layer.model.config["shared_expert_intermediate_size"])
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
    if not config.get("use_sliding_window", False) or "olmo" in kind:
        config.ignore("layer_types")
        return [0] * model.num_layers
    window = int(config.get("sliding_window") or 0)
    if kind == "qwen3_moe":
        return [window] * model.num_layers
    last = int(config.get("max_window_layers", 28))
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
    config.ignore("rope_theta", "initial_context_length", "swiglu_limit", "swiglu_alpha", "experts_per_token")
    rotary = model.rotary(read_rotary(config, sizes.head_dim, theta=150000.0, settings=None if is_given else yarn))
    kinds = ["full_attention" if i % 2 else "sliding_attention" for i in model.numbers]
    windows, bias = (
        model.windows(kinds, window=int(config.get("sliding_window", 128))),
        bool(config.get("attention_bias", True)),
    )
    config.ignore("hidden_act")
    experts, inner = num_experts(config), int(config["intermediate_size"])
    limit, slope = float(config.get("swiglu_limit", 7.0)), float(config.get("swiglu_alpha", 1.702))
    activation = Activation("silu", limit=limit, slope=slope, up_offset=1.0)
    model.embed()
    for layer, window in zip(model.layers(), windows, strict=True):
        source = layer.norm(norm, "input_layernorm")
        layer.attention(
            source, sizes, qkv_bias=bias, out_bias=bias, rotary=rotary, window=window,
            sinks=layer.weight("self_attn.sinks", sizes.heads),
        )  # fmt: skip
        source = layer.norm(norm, "post_attention_layernorm")
        layer.route(
            source,
            experts,
            "mlp.router",
            bias=True,
            top_k=int(config["num_experts_per_tok"]),
            scores="softmax_of_chosen",
        )
        layer.stacked_experts(
            source, experts, inner, activation, "mlp.experts.gate_up_proj", "mlp.experts.down_proj", transpose=True,
            bias=True, interleaved=True,
        )  # fmt: skip
    model.head(norm("model.norm", model.hidden_size))


@family("ernie4_5_moe")
def ernie_moe(model: Builder) -> None:
    """A bias for the choice of experts, shared experts, and dense layers at the beginning."""
    config = model.config
    norm, sizes = NormKind(config["rms_norm_eps"]), model.head_sizes(is_interleaved=True)
    rotary = model.rotary(read_rotary(config, sizes.head_dim, theta=5e5))
    activation, bias = model.activation("hidden_act", default="silu"), bool(config.get("use_bias", False))
    experts, size = num_experts(config, "moe_num_experts"), int(config["moe_intermediate_size"])
    first, last = int(config.get("moe_layer_start_index", 1)), int(config.get("moe_layer_end_index", -1))
    last, period = (model.num_layers - 1 if last < 0 else last), int(config.get("moe_layer_interval", 1))
    shared = int(config.get("moe_num_shared_experts", 2))
    model.spare.append(r".*mtp.*")
    model.embed()
    for layer in model.layers():
        source = layer.norm(norm, "input_layernorm")
        layer.attention(source, sizes, qkv_bias=bias, out_bias=bias, rotary=rotary)
        source = layer.norm(norm, "post_attention_layernorm")
        if not (first <= layer.number <= last and (layer.number + 1) % period == 0):
            layer.feed_forward(source, config["intermediate_size"], activation, bias=bias)
            continue
        layer.route(
            source, experts, top_k=int(config.first("moe_k", "num_experts_per_tok")), scores="softmax", normalize=True,
            choice_bias=layer.weight("mlp.moe_statics.e_score_correction_bias", 1, experts),
            least_sum=float(config.get("moe_norm_min", 1e-12)),
        )  # fmt: skip
        layer.experts(source, experts, size, activation)
        if shared:
            layer.feed_forward(source, shared * size, activation, prefix="mlp.shared_experts.", bias=bias)
    model.head(norm("model.norm", model.hidden_size), tied_by_default=True)


@family("glm4_moe", "dots1", "exaone_moe", "solar_open")
def biased_moe(model: Builder) -> None:
    """Llama's attention, and DeepSeek V3's experts after a few dense layers. EXAONE rotates only in its windows."""
    config, kind = model.config, model.config.kind
    norm, sizes = NormKind(config["rms_norm_eps"]), model.head_sizes()
    rotary = read_rotary(config, sizes.head_dim, part={"glm4_moe": 0.5, "solar_open": 1.0}.get(kind))
    index, bias = model.rotary(rotary), bool(config.get("attention_bias", False)) and kind != "exaone_moe"
    out_bias = bias and kind == "dots1"
    has_norms = kind in ("dots1", "exaone_moe") or (kind == "glm4_moe" and bool(config.get("use_qk_norm", False)))
    windows = _biased_windows(model)
    activation, size = model.activation("hidden_act", default="silu"), int(config["moe_intermediate_size"])
    experts = num_experts(config, "n_routed_experts")
    shared = int(config.first("n_shared_experts", "num_shared_experts"))
    dense = 0 if kind == "solar_open" else int(config.get("first_k_dense_replace", 0 if kind == "dots1" else 1))
    kinds = config.get("mlp_layer_types") if kind == "exaone_moe" else None
    bias_name = "mlp.e_score_correction_bias" if kind == "exaone_moe" else "mlp.gate.e_score_correction_bias"
    config.ignore("num_mtp_layers", "num_nextn_predict_layers", "first_k_dense_replace", "scoring_func", "topk_method",
                  "intermediate_size")  # fmt: skip
    model.spare += [rf"model\.layers\.{model.num_layers}\..*", r"mtp\..*"]
    model.embed()
    for layer, window in zip(model.layers(), windows, strict=True):
        is_rotated = kind != "exaone_moe" or window or not any(windows)
        layer.attention(
            layer.norm(norm, "input_layernorm"), sizes, qkv_bias=bias, out_bias=out_bias,
            rotary=index if is_rotated else None, window=window,
            norms=layer.head_norms(norm, sizes) if has_norms else None,
        )  # fmt: skip
        source = layer.norm(norm, "post_attention_layernorm")
        if kinds[layer.number] != "sparse" if kinds else layer.number < dense:
            layer.feed_forward(source, config["intermediate_size"], activation)
            continue
        add_biased_experts(layer, source, experts, size, shared, activation, bias_name)
    model.head(norm("model.norm", model.hidden_size))


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
        period = int(config.get("sliding_window_pattern", 4))
        kinds = ["sliding_attention" if (i + 1) % period else "full_attention" for i in model.numbers]
        return model.windows(kinds, window=int(config.get("sliding_window", 4096)))
    if kind == "dots1":
        first = int(config.get("max_window_layers", 62))
        is_windowed = config.get("sliding_window", 4096) is not None
        kinds = ["sliding_attention" if is_windowed and i >= first else "full_attention" for i in model.numbers]
        return model.windows(kinds, window=int(config.get("sliding_window", 4096) or 0))
    return [0] * model.num_layers


@family("hunyuan_v1_moe")
def hunyuan_moe(model: Builder) -> None:
    """HunYuan with experts in every layer, beside a shared one."""
    config = model.config
    norm, sizes = NormKind(config["rms_norm_eps"]), model.head_sizes()
    rotary, bias = model.rotary(hunyuan_rotary(model, sizes.head_dim)), bool(config.get("attention_bias", False))
    activation, experts = model.activation("hidden_act", default="silu"), num_experts(config)
    top_k, inner = config.first("moe_topk", "num_experts_per_tok"), int(config["intermediate_size"])
    if isinstance(top_k, list):
        if len(set(top_k)) != 1:
            raise UnsupportedConfig("its layers choose different numbers of experts")
        top_k = top_k[0]
    config.ignore("moe_intermediate_size", "num_shared_expert", "use_qk_norm", "eod_token_id")
    model.embed()
    for layer in model.layers():
        source = layer.norm(norm, "input_layernorm")
        norms = layer.head_norms(norm, sizes, ("self_attn.query_layernorm", "self_attn.key_layernorm"), last=True)
        layer.attention(source, sizes, qkv_bias=bias, out_bias=bias, rotary=rotary, norms=norms)
        source = layer.norm(norm, "post_attention_layernorm")
        layer.route(source, experts, "mlp.gate.wg", top_k=int(top_k), scores="softmax", normalize=True)
        layer.experts(source, experts, inner, activation)
        layer.feed_forward(source, inner, activation, prefix="mlp.shared_mlp.")
    model.head(norm("model.norm", model.hidden_size))


@family("hy_v3", "afmoe")
def hy_v3(model: Builder) -> None:
    """AFMoE has norms on both sides, gates after attention, and rotates only in its windows."""
    config, is_afmoe = model.config, model.config.kind == "afmoe"
    norm, sizes = NormKind(config.get("rms_norm_eps", 1e-5)), model.head_sizes()
    rotary = model.rotary(read_rotary(config, sizes.head_dim, theta=1e4 if is_afmoe else 11158840.0))
    bias, mlp_bias = bool(config.get("attention_bias", False)), not is_afmoe and bool(config.get("mlp_bias", False))
    activation, experts = model.activation("hidden_act", default="silu"), num_experts(config)
    size, shared = int(config["moe_intermediate_size"]), int(config.get("num_shared_experts", 2 if is_afmoe else 1))
    period = int(config.get("global_attn_every_n_layers", 4))
    kinds = ["sliding_attention" if (i + 1) % period else "full_attention" for i in model.numbers]
    windows = (
        model.windows(kinds, window=int(config.get("sliding_window", 1024))) if is_afmoe else [0] * model.num_layers
    )
    dense = int(config.get("num_dense_layers", 1)) if is_afmoe else 1
    sparse = [i >= dense for i in model.numbers]
    if not is_afmoe and config.get("mlp_layer_types"):
        sparse = [one == "sparse" for one in config["mlp_layer_types"]]
    config.ignore("first_k_dense_replace", "route_norm", "qk_norm", "score_func", "n_group", "topk_group",
                  "enable_moe_fp32_combine", "num_nextn_predict_layers", "load_balance_coeff", "num_expert_groups",
                  "num_limited_groups", "use_grouped_mm")  # fmt: skip
    model.spare.append(rf"model\.layers\.{model.num_layers}\..*")
    factor = float(config.get("route_scale", 1.0) if is_afmoe else config.get("router_scaling_factor", 2.826))
    model.embed(scale=model.hidden_size**0.5 if is_afmoe and config.get("mup_enabled", False) else 1.0)
    for layer, window in zip(model.layers(), windows, strict=True):
        source = layer.norm(norm, "input_layernorm")
        gate = None
        if is_afmoe:
            columns = sizes.heads * sizes.head_dim
            model.add(Linear(source, "gate", layer.matrix("self_attn.gate_proj", columns, model.hidden_size)))
            gate = Gate("gate", "attended")
        layer.attention(
            source, sizes, qkv_bias=bias, out_bias=bias, rotary=rotary if window or not is_afmoe else None,
            window=window, gate=gate, post_norm=layer.post_norm(norm, "post_attention_layernorm") if is_afmoe else None,
            norms=layer.head_norms(norm, sizes),
        )  # fmt: skip
        source = layer.norm(norm, "pre_mlp_layernorm" if is_afmoe else "post_attention_layernorm")
        target = "added" if is_afmoe else RESIDUAL
        if not sparse[layer.number]:
            inner = int(config["intermediate_size"])
            layer.feed_forward(source, inner, activation, bias=mlp_bias, target=target, add=not is_afmoe)
        else:
            choice = layer.weight("mlp.expert_bias", experts)
            layer.route(
                source, experts, "mlp.router.gate", top_k=int(config["num_experts_per_tok"]), scores="sigmoid",
                choice_bias=choice, normalize=True, epsilon=1e-20, factor=factor,
            )  # fmt: skip
            layer.experts(source, experts, size, activation, target=target)
            prefix = "mlp.shared_experts." if is_afmoe else "mlp.shared_mlp."
            layer.feed_forward(source, shared * size, activation, prefix=prefix, bias=mlp_bias, target=target)
        if is_afmoe:
            layer.add_normed(layer.post_norm(norm, "post_mlp_layernorm"))
    model.head(norm("model.norm", model.hidden_size))


@family("llama4", "llama4_text")
def llama4(model: Builder) -> None:
    """Chunks where tokens are rotated; elsewhere queries grow with the position. Weights of experts multiply inputs."""
    config, hidden = model.config, model.hidden_size
    norm, sizes = NormKind(config.get("rms_norm_eps", 1e-5)), model.head_sizes(is_interleaved=True)
    rotary = model.rotary(read_rotary(config, sizes.head_dim, theta=5e5))
    is_tuned = bool(config.get("attn_temperature_tuning", True))
    interval = int(config.get("no_rope_layer_interval", 4))
    has_rope = config.get("no_rope_layers") or [(i + 1) % interval != 0 for i in model.numbers]
    chunk = int(config.get("attention_chunk_size", 8192))
    kinds = config.get("layer_types") or ["chunked_attention" if one else "full_attention" for one in has_rope]
    if not set(kinds) <= {"chunked_attention", "full_attention"}:
        raise UnsupportedConfig("it has layers of other types")
    floor, beta = float(config.get("floor_scale", 8192)), float(config.get("attn_scale", 0.1))
    scaled = model.query_scale(beta, floor, shift=1) if is_tuned else None
    activation, bias = model.activation("hidden_act", default="silu"), bool(config.get("attention_bias", False))
    step = int(config.get("interleave_moe_layer_step", 1))
    sparse = config.get("moe_layers")
    sparse = set(range(step - 1, model.num_layers, step) if sparse is None else sparse)
    experts, inner = num_experts(config), int(config["intermediate_size"])
    head_norm = NormKind(norm.eps, has_weight=False)
    has_norms = bool(config.get("use_qk_norm", True))
    config.ignore("for_llm_compressor", "intermediate_size_mlp")
    model.layouts = WITH_PICTURES
    model.spare.append(r"(model\.)?(vision_model|multi_modal_projector)\..*")
    model.embed()
    for layer, kind in zip(model.layers(), kinds, strict=True):
        is_rotated = bool(has_rope[layer.number])
        norms = layer.head_norms(head_norm, sizes, last=True) if has_norms and is_rotated else None
        layer.attention(
            layer.norm(norm, "input_layernorm"), sizes, qkv_bias=bias, out_bias=bias,
            rotary=rotary if is_rotated else scaled, chunk=chunk if kind == "chunked_attention" else 0, norms=norms,
        )  # fmt: skip
        source = layer.norm(norm, "post_attention_layernorm")
        if layer.number not in sparse:
            layer.feed_forward(source, config["intermediate_size_mlp"], activation, prefix="feed_forward.")
            continue
        layer.route(
            source, experts, "feed_forward.router", top_k=int(config["num_experts_per_tok"]), scores="sigmoid_of_chosen"
        )
        layer.stacked_experts(
            source, experts, inner, activation, "feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj",
            transpose=True, weigh_input=True,
        )  # fmt: skip
        layer.feed_forward(source, inner, activation, prefix="feed_forward.shared_expert.")
    model.head(norm("model.norm", hidden))
