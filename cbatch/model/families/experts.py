"""Mixtures of experts that are otherwise of Llama's kind."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

from cbatch.model.config import ConfigReader, UnsupportedConfig
from cbatch.model.families.builder import STACKED, Builder, HeadSizes, Layer, NormKind
from cbatch.model.families.decoder import (
    MakeGate,
    Part,
    attention,
    decoder,
    every,
    family,
    feed_forward,
    head_norms,
    mixture,
    num_experts,
    row_norms,
)
from cbatch.model.families.llama import hunyuan_attention
from cbatch.model.ops.all import Activation, Gate, HeadNorms, Linear, Rotary

_CHOICE_BIAS = "e_score_correction_bias"


def biased_router(config: ConfigReader, choice_bias: str = f"mlp.gate.{_CHOICE_BIAS}") -> dict[str, Any]:
    """DeepSeek V3's: sigmoids, a bias for the choice, and groups of experts, of which the best are used."""
    return {
        "choice_bias": choice_bias,
        "scores": "sigmoid",
        "groups": int(config.get("n_group") or 1),
        "top_groups": int(config.get("topk_group") or 1),
        "group_score": "two_highest",
        "normalize": config.flag("norm_topk_prob", True),
        "epsilon": 1e-20,
        "factor": float(config.get("routed_scaling_factor") or 1.0),
    }


def sparse_layers(config: ConfigReader, layers: int, dense: Sequence[int] = ()) -> list[bool]:
    """Which layers have experts, as Qwen says it. dense: those that have none, of files that do not say it"""
    period, given = config.whole("decoder_sparse_step"), config.get("mlp_only_layers")
    return [layer not in (dense if given is None else given) and (layer + 1) % period == 0 for layer in range(layers)]


@family("mixtral", "minimax_m2")
def mixtral(model: Builder) -> None:
    """MiniMax has norms of all queries together, rotates a part of each head, and has sigmoids in its router."""
    config, is_mixtral, prefix = model.config, model.kind == "mixtral", "block_sparse_moe."
    model.read(has_rotary=False)
    router = {"name": prefix + "gate", "scores": "softmax", "normalize": True}
    if is_mixtral:
        model.rotary = model.read_rotary()
    else:
        head_dim = model.sizes.head_dim
        model.rotary = model.read_rotary(part=float(config.get("rotary_dim") or head_dim) / head_dim)
        router |= {"scores": "sigmoid", "choice_bias": prefix + _CHOICE_BIAS}
    window = int(config.get("sliding_window") or 0) if is_mixtral else 0
    size, names = config.whole("intermediate_size"), ("w1", "w3", "w2")
    feed = mixture(model, router, size=size, prefix=prefix + "experts.", names=names)
    decoder(model, attention(window=window, norms=None if is_mixtral else row_norms), feed)


@family("qwen2_moe", "qwen3_moe", "qwen3_vl_moe_text", "qwen3_omni_moe_text", "olmoe", "flex_olmo", "mellum")
def qwen_moe(model: Builder) -> None:
    """Qwen 2 has a shared expert with a gate. OLMoE norms all queries together, FlexOlmo after each part, too."""
    config, kind = model.config, model.kind
    model.read(has_rotary=False)
    is_olmo, is_post, is_qwen2 = "olmo" in kind, kind == "flex_olmo", kind == "qwen2_moe"
    bias = config.flag("qkv_bias" if is_qwen2 else "attention_bias")
    windows, size = _qwen_windows(model), config.whole("intermediate_size" if is_olmo else "moe_intermediate_size")
    config.ignore("intermediate_size")
    if kind == "mellum":
        types = model.layer_types(["full_attention"] * model.num_layers)
        rotary = [model.read_rotary(layer_type=one) for one in types]
        is_sparse = model.sparse_by_type([True] * model.num_layers)
        config.ignore("num_nextn_predict_layers")
    else:
        rotary = [model.read_rotary()] * model.num_layers
        is_sparse = [True] * model.num_layers if is_olmo else sparse_layers(config, model.num_layers)
    attend = attention(
        qkv_bias=bias, out_bias=bias and not is_qwen2, rotary=rotary, window=windows,
        norms=None if is_qwen2 else row_norms if is_olmo else head_norms(),
        clip=float(config.get("clip_qkv") or 0.0) if kind == "olmoe" else 0.0,
        after="post_attention_layernorm" if is_post else "",
    )  # fmt: skip
    normalize = config.flag("norm_topk_prob") or kind == "qwen3_vl_moe_text"
    feed = mixture(
        model, {"scores": "softmax", "normalize": normalize}, size=size, sparse=is_sparse,
        after="post_feedforward_layernorm" if is_post else "", beside=gated_shared_expert if is_qwen2 else None,
    )  # fmt: skip
    decoder(model, attend, feed, norms=("", "") if is_post else ("input_layernorm", "post_attention_layernorm"))


def gated_shared_expert(layer: Layer, source: str) -> None:
    """The gate multiplies what goes into the last linear, which is the same."""
    model, size = layer.model, layer.model.config.whole("shared_expert_intermediate_size")
    names = [f"mlp.shared_expert.{name}_proj" for name in ("gate", "up", "down")]
    up = layer.matrix(names[:2], [size, size], model.hidden_size)
    model.add(Linear(source, "shared", up, activation=model.activation))
    model.add(Linear(source, "shared_gate", layer.matrix("mlp.shared_expert_gate", 1, model.hidden_size)))
    model.add(Gate("shared_gate", "shared", width=size))
    layer.add_to_residual("shared", layer.matrix(names[2], model.hidden_size, size))


def _qwen_windows(model: Builder) -> list[int]:
    config, kind = model.config, model.kind
    if kind == "mellum":
        return model.windows()
    config.ignore("sliding_window", "max_window_layers")
    if not config.flag("use_sliding_window") or "olmo" in kind or kind.endswith("_text"):
        config.ignore("layer_types")
        return [0] * model.num_layers
    window = int(config.get("sliding_window") or 0)
    if kind == "qwen3_moe":
        return [window] * model.num_layers
    last = config.whole("max_window_layers")
    kinds = ["sliding_attention" if (i + 1) % 2 and i < last else "full_attention" for i in model.numbers]
    return model.windows(kinds)


@family("gpt_oss")
def gpt_oss(model: Builder) -> None:
    """Sinks, windows in every other layer, and clipped activations; gate and up take turns in their matrix."""
    config = model.config
    yarn = {"rope_type": "yarn", "rope_theta": 150000.0, "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0,
            "truncate": False, "original_max_position_embeddings": 4096, "partial_rotary_factor": 1.0}  # fmt: skip
    is_given = config.get("rope_parameters") or config.get("rope_scaling")
    config.ignore("rope_theta")
    model.read(activation=clipped_silu(config), settings=None if is_given else yarn)
    feed = mixture(
        model, {"name": "mlp.router", "bias": True, "scores": "softmax_of_chosen"},
        size=config.whole("intermediate_size"), names=STACKED, stacked=True, transpose=True, bias=True,
        interleaved=True,
    )  # fmt: skip
    windows = model.windows(every(2, model.num_layers))
    attend = attention(bias=config.flag("attention_bias"), window=windows, has_sinks=True)
    decoder(model, attend, feed)


def clipped_silu(config: ConfigReader) -> Activation:
    """GPT-OSS' activation."""
    return Activation(
        "silu", limit=config.number("swiglu_limit"), slope=config.number("swiglu_alpha"), up_offset=1.0
    )  # fmt: skip


@family("ernie4_5_moe", "ernie4_5_vl_moe_text")
def ernie_moe(model: Builder) -> None:
    """A bias for the choice of experts, shared experts, and dense layers at the beginning.

    Tokens of pictures have experts of their own, which follow those of text in the files.
    """
    config, has_pictures = model.config, model.kind == "ernie4_5_vl_moe_text"
    model.read(is_interleaved=True)
    router = {
        "top_k": config.whole("moe_k"), "scores": "softmax", "normalize": True, "transpose": has_pictures,
        "choice_bias": f"mlp.moe_statics.{_CHOICE_BIAS}", "choice_shape": (1 + has_pictures,),
        "least_sum": config.number("moe_norm_min"),
    }  # fmt: skip
    if has_pictures:
        size, _ = config.get("moe_intermediate_size") or (1536, 512)
        count = num_experts(config)
        others = "|".join(map(str, range(count, 2 * count)))
        model.spare += [rf".*\.mlp\.experts\.({others})\..*", r".*\.mlp\.gate\.weight_1"]
        sparse = model.sparse_by_type([number > 0 for number in model.numbers])
    else:
        size, period = config.whole("moe_intermediate_size"), config.whole("moe_layer_interval")
        first, last = config.whole("moe_layer_start_index"), config.whole("moe_layer_end_index")
        last = model.num_layers - 1 if last < 0 else last
        sparse = [first <= i <= last and (i + 1) % period == 0 for i in model.numbers]
    bias, shared = config.flag("use_bias"), config.whole("moe_num_shared_experts")
    feed = mixture(
        model, router, size=size, num_shared=shared, shared_bias=bias, sparse=sparse, dense=feed_forward(bias=bias)
    )
    decoder(model, attention(bias=bias), feed)


@family("glm4_moe", "glm4v_moe_text", "dots1", "exaone_moe", "solar_open", "sarvam_moe")
def biased_moe(model: Builder) -> None:
    """Llama's attention, and DeepSeek V3's experts after a few dense layers. EXAONE rotates only in its windows.

    Sarvam has one linear for queries, keys and values.
    """
    config, kind, is_exaone, is_sarvam = model.config, model.kind, *(model.kind == one for one in _OTHERS)
    model.read(part=1.0 if kind == "solar_open" else None)
    bias = config.flag("attention_bias") and not is_exaone
    has_norms = kind in ("dots1", "exaone_moe") or (kind in ("glm4_moe", "sarvam_moe") and config.flag("use_qk_norm"))
    windows = _biased_windows(model)
    dense = 0 if kind == "solar_open" else config.whole("first_k_dense_replace")
    sparse = [i >= dense for i in model.numbers]
    config.ignore("first_k_dense_replace", "intermediate_size")
    model.spare.append(rf"model\.layers\.{model.num_layers}\..*")
    attend = attention(
        prefix="attention." if is_sarvam else "self_attn.", out="dense" if is_sarvam else "o_proj",
        qkv="query_key_value" if is_sarvam else None, qkv_bias=bias, out_bias=bias and kind == "dots1", window=windows,
        norms=head_norms(*(_SARVAM_NORMS if is_sarvam else ())) if has_norms else None,
        rotary=[model.rotary if not is_exaone or window or not any(windows) else None for window in windows],
    )  # fmt: skip
    choice_bias = "mlp.gate.expert_bias" if is_sarvam else ("mlp." if is_exaone else "mlp.gate.") + _CHOICE_BIAS
    feed = mixture(
        model, biased_router(config, choice_bias), sparse=model.sparse_by_type(sparse) if is_exaone else sparse,
        num_shared=int(config.first("n_shared_experts", "num_shared_experts")),
    )  # fmt: skip
    decoder(model, attend, feed, embed="word_embeddings" if is_sarvam else "embed_tokens")


_OTHERS = "exaone_moe", "sarvam_moe"
_SARVAM_NORMS = "attention.query_layernorm", "attention.key_layernorm"


def _biased_windows(model: Builder) -> list[int]:
    config = model.config
    if model.kind == "exaone_moe":
        return model.windows(every(config.whole("sliding_window_pattern"), model.num_layers))
    if model.kind == "dots1":
        first = config.whole("max_window_layers")
        is_windowed = config.get("sliding_window") is not None
        kinds = ["sliding_attention" if is_windowed and i >= first else "full_attention" for i in model.numbers]
        return model.windows(kinds)
    return [0] * model.num_layers


@family("hunyuan_v1_moe")
def hunyuan_moe(model: Builder) -> None:
    """HunYuan with experts in every layer, beside a shared one."""
    config = model.config
    attend = hunyuan_attention(model)
    top_k, inner = config["moe_topk"], config.whole("intermediate_size")
    if isinstance(top_k, list):
        if len(set(top_k)) != 1:
            raise UnsupportedConfig("its layers choose different numbers of experts")
        top_k = top_k[0]
    router = {"name": "mlp.gate.wg", "top_k": int(top_k), "scores": "softmax", "normalize": True}
    feed = mixture(model, router, size=inner, num_shared=1, shared_prefix="mlp.shared_mlp.")
    decoder(model, attend, feed)


@family("hy_v3")
def hy_v3(model: Builder) -> None:
    """Norms of queries and keys, and experts by sigmoids with a bias for the choice."""
    config = model.config
    model.read()
    bias, sparse = config.flag("mlp_bias"), model.sparse_by_type([i >= 1 for i in model.numbers])
    config.ignore("enable_moe_fp32_combine")
    feed = _sigmoid_experts(
        model, config.number("router_scaling_factor"), sparse=sparse, dense=feed_forward(bias=bias),
        shared_prefix="mlp.shared_mlp.", shared_bias=bias,
    )  # fmt: skip
    decoder(model, attention(bias=config.flag("attention_bias"), norms=head_norms()), feed)


@family("afmoe")
def afmoe(model: Builder) -> None:
    """HY 3 with norms on both sides and gates after attention; it rotates only in its windows."""
    config, hidden = model.config, model.hidden_size
    model.read()
    windows = model.windows(every(config.whole("global_attn_every_n_layers"), model.num_layers))
    sparse = [i >= config.whole("num_dense_layers") for i in model.numbers]
    feed = _sigmoid_experts(model, config.number("route_scale"), sparse=sparse, after="post_mlp_layernorm")
    attend = attention(
        bias=config.flag("attention_bias"), rotary=[model.rotary if window else None for window in windows],
        window=windows, gate=output_gate(), norms=head_norms(), after="post_attention_layernorm",
    )  # fmt: skip
    scale = hidden**0.5 if config.flag("mup_enabled") else 1.0
    decoder(model, attend, feed, scale=scale, norms=("input_layernorm", "pre_mlp_layernorm"))


def output_gate(
    name: str = "gate_proj", *, by_head: bool = False, function: Literal["sigmoid", "softplus"] = "sigmoid"
) -> MakeGate:
    """A gate for each number that attention gives, or for each head, by a linear of this name."""

    def gate(layer: Layer, source: str, sizes: HeadSizes) -> Gate:
        width = sizes.cache.value_dim if by_head else 1
        columns = sizes.heads * sizes.cache.value_dim // width
        layer.model.add(Linear(source, "gate", layer.matrix(f"self_attn.{name}", columns, layer.model.hidden_size)))
        return Gate("gate", "attended", width=width, function=function)

    return gate


def _sigmoid_experts(model: Builder, factor: float, **options: Any) -> Part:
    """factor: of the experts' weights; options: see `mixture`"""
    model.spare.append(rf"model\.layers\.{model.num_layers}\..*")
    router = {"name": "mlp.router.gate", "scores": "sigmoid", "choice_bias": "mlp.expert_bias", "normalize": True,
              "epsilon": 1e-20, "factor": factor}  # fmt: skip
    return mixture(model, router, num_shared=model.config.whole("num_shared_experts"), **options)


@family("llama4_text")
def llama4(model: Builder) -> None:
    """Chunks where tokens are rotated; elsewhere queries grow with the position. Weights of experts multiply inputs."""
    config, prefix = model.config, "feed_forward."
    model.read(is_interleaved=True)
    is_tuned, interval = config.flag("attn_temperature_tuning"), config.whole("no_rope_layer_interval")
    has_rope = config.get("no_rope_layers") or [(i + 1) % interval != 0 for i in model.numbers]
    chunk, known = config.whole("attention_chunk_size"), ("full_attention", "chunked_attention")
    kinds = model.layer_types([known[bool(one)] for one in has_rope], known)
    floor, beta = config.number("floor_scale"), config.number("attn_scale")
    scaled = model.add_rotary(Rotary((), scale_beta=beta, scale_floor=floor, scale_shift=1)) if is_tuned else None
    step, sparse = config.whole("interleave_moe_layer_step"), config.get("moe_layers")
    sparse = set(range(step - 1, model.num_layers, step) if sparse is None else sparse)
    inner, has_norms = config.whole("intermediate_size"), config.flag("use_qk_norm")
    config.ignore("intermediate_size_mlp")
    rotated_norms = head_norms(kind=NormKind(model.norm.eps, has_weight=False), last=True)

    def norms(layer: Layer, sizes: HeadSizes) -> HeadNorms | None:
        return rotated_norms(layer, sizes) if has_norms and has_rope[layer.number] else None

    attend = attention(
        bias=config.flag("attention_bias"), chunk=[chunk if kind == "chunked_attention" else 0 for kind in kinds],
        rotary=[model.rotary if has_rope[i] else scaled for i in model.numbers], norms=norms,
    )  # fmt: skip
    feed = mixture(
        model, {"name": prefix + "router", "scores": "sigmoid_of_chosen"}, size=inner, num_shared=1,
        shared_prefix=prefix + "shared_expert.", sparse=[i in sparse for i in model.numbers],
        dense=lambda layer, source: feed_forward(size=config["intermediate_size_mlp"], prefix=prefix)(layer, source),
        prefix=prefix + "experts.", names=STACKED, stacked=True, transpose=True, weigh_input=True,
    )  # fmt: skip
    decoder(model, attend, feed)
