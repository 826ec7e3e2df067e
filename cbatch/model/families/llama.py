"""Llama and its kin, some with norms after each part (OLMo, EXAONE, GLM), or both parts after one norm (Cohere)."""

from __future__ import annotations

from dataclasses import replace

import torch

from cbatch.model.config import UnsupportedConfig
from cbatch.model.families.builder import STACKED, Builder, HeadSizes, Layer, NormKind, deinterleaved
from cbatch.model.families.decoder import Part, attention, decoder, every, family, feed_forward, head_norms, row_norms
from cbatch.model.families.rotary import read_rotary, rope_settings
from cbatch.model.ops.all import Activation, HeadNorms, Norm, Normalize, Weight
from cbatch.model.weight import RESIDUAL


@family("llama", "mistral", "qwen2", "qwen3", "internlm3", "iquestcoder", "emu3_text_model", "ministral", "cwm",
        "seed_oss", "mimo", "qwen2_vl_text", "qwen2_5_vl_text", "qwen2_5_omni_text", "qwen3_vl_text", "arcee",
        "ernie4_5", "paddleocr_vl_text", "helium")  # fmt: skip
def llama(model: Builder) -> None:
    """Qwen 2 has biases, Qwen 3 norms of queries and keys, Mistral and Qwen windows. MiMo drafts with more layers.

    Arcee's feed-forward part has no gate; ERNIE and Helium rotate neighbours.
    """
    config, kind = model.config, model.kind
    is_ernie, is_qwen2 = kind in ("ernie4_5", "paddleocr_vl_text"), kind.startswith("qwen2") or kind == "mimo"
    model.read(is_interleaved=kind in ("ernie4_5", "helium"), gated=kind != "arcee")
    if kind == "mimo":
        config.expect("attention_bias", True)
    bias, mlp_bias = (config.flag("use_bias" if is_ernie else key) for key in ("attention_bias", "mlp_bias"))
    bias = bias or is_qwen2
    out_bias = config.flag("attention_out_bias") if kind == "seed_oss" else bias and not (is_qwen2 or kind == "helium")
    norms = head_norms() if kind.startswith("qwen3") else None
    attend = attention(qkv_bias=bias, out_bias=out_bias, window=_windows(model), norms=norms)
    decoder(model, attend, feed_forward(bias=mlp_bias))


def _windows(model: Builder) -> list[int]:
    config, kind = model.config, model.kind
    has_window = kind in ("mistral", "ministral", "cwm") or config.flag("use_sliding_window")
    has_window = has_window and kind != "qwen3_vl_text"
    kinds = config.get("layer_types")
    if not has_window:
        config.ignore("sliding_window", "max_window_layers")
        if kinds is not None and "sliding_attention" in kinds:
            raise UnsupportedConfig("its config has sliding windows, which its family does not support")
        return model.windows()
    if kinds is not None:
        config.ignore("max_window_layers")
        return model.windows()
    window = int(config.get("sliding_window") or 0)
    if kind == "cwm":
        return [0 if layer % 4 == 0 else window for layer in model.numbers]
    first = config.whole("max_window_layers", 0) if kind.startswith(("qwen", "mimo")) else 0
    return [window if layer >= first else 0 for layer in model.numbers]


@family("exaone")
def exaone(model: Builder) -> None:
    """Llama with the names of GPT-2."""
    config = model.config
    model.read()
    decoder(
        model, attention(prefix="attn.attention.", out="out_proj", bias=config.flag("attention_bias")),
        feed_forward(names=("c_fc_0", "c_fc_1", "c_proj"), bias=config.flag("mlp_bias")), norms=("ln_1", "ln_2"),
        root="transformer.", embed="wte", layers="h", final="ln_f",
    )  # fmt: skip


@family("smollm3")
def smollm3(model: Builder) -> None:
    """Every fourth layer has no positions."""
    config = model.config
    model.read()
    interval = config.whole("no_rope_layer_interval")
    has_rope = config.get("no_rope_layers") or [(layer + 1) % interval != 0 for layer in model.numbers]
    is_windowed = config.flag("use_sliding_window") and config.get("sliding_window") is not None
    kinds = ["sliding_attention" if is_windowed and not has_rope[i] else "full_attention" for i in model.numbers]
    rotary = [model.rotary if has_rope[i] else None for i in model.numbers]
    attend = attention(bias=config.flag("attention_bias"), rotary=rotary, window=model.windows(kinds))
    decoder(model, attend, feed_forward(bias=config.flag("mlp_bias")))


@family("ministral3")
def ministral3(model: Builder) -> None:
    """Queries grow with the position, once it is past the context of pretraining."""
    config = model.config
    model.read(has_rotary=False)
    rope = rope_settings(config)
    floor, beta = float(rope["original_max_position_embeddings"]), float(rope["llama_4_scaling_beta"])
    plain = read_rotary(config, model.sizes.head_dim)
    model.rotary = model.add_rotary(replace(plain, scale_beta=beta, scale_floor=floor))
    decoder(model, attention(window=int(config.get("sliding_window") or 0)), feed_forward())


@family("apertus")
def apertus(model: Builder) -> None:
    """Norms of queries and keys, and an activation with numbers of its own in each layer."""
    model.config.expect("hidden_act", "xielu")
    model.read(activation=Activation("xielu", gated=False))

    def feed(layer: Layer, source: str) -> None:
        alphas = [replace(layer.weight(f"mlp.act_fn.alpha_{sign}", 1), function="softplus") for sign in "pn"]
        params = (*alphas, layer.weight("mlp.act_fn.beta"), layer.weight("mlp.act_fn.eps"))
        feed_forward(activation=replace(model.activation, params=params))(layer, source)

    attend = attention(bias=model.config.flag("attention_bias"), norms=head_norms())
    decoder(model, attend, feed, norms=("attention_layernorm", "feedforward_layernorm"))


@family("hunyuan_v1_dense", "hunyuan_vl_text")
def hunyuan(model: Builder) -> None:
    """Norms of queries and keys come after the rotation."""
    decoder(model, hunyuan_attention(model), feed_forward())


def hunyuan_attention(model: Builder) -> Part:
    """Attention of HunYuan, with and without experts. `alpha` makes its base larger, for any length."""
    config = model.config
    model.read(has_rotary=False)
    config["head_dim"]
    head_dim, rope = model.sizes.head_dim, rope_settings(config)
    rotary = read_rotary(config, head_dim, aliases={"xdrope": "dynamic"})
    if rope.get("rope_type", rope.get("type")) in ("dynamic", "xdrope") and rope.get("alpha"):
        theta = rope["rope_theta"] * rope["alpha"] ** (head_dim / (head_dim - 2))
        inv_freq = 1.0 / theta ** (torch.arange(0, head_dim, 2).float() / head_dim)
        rotary = replace(rotary, inv_freq=tuple(inv_freq.tolist()))
    model.rotary = model.add_rotary(rotary)
    norms = head_norms("self_attn.query_layernorm", "self_attn.key_layernorm", last=True)
    return attention(bias=config.flag("attention_bias"), norms=norms)


@family("nanochat")
def nanochat(model: Builder) -> None:
    """Norms without weights, also of the embedding; rotations go backwards, and queries and keys are normed after."""
    config = model.config
    norm = NormKind(config.get("rms_norm_eps"), has_weight=False)
    model.read(norm=norm, has_rotary=False, gated=False)
    forward = read_rotary(config, model.sizes.head_dim)
    model.rotary = model.add_rotary(replace(forward, inv_freq=tuple(-step for step in forward.inv_freq)))
    attend = attention(bias=config.flag("attention_bias"), norms=head_norms(last=True))
    softcap = config.get("final_logit_softcapping")
    normalize = Normalize(RESIDUAL, RESIDUAL, Norm("rms", norm.eps))
    decoder(model, attend, feed_forward(names=("fc1", "fc2")), before=lambda: model.add(normalize), softcap=softcap)


@family("olmo")
def olmo(model: Builder) -> None:
    """LayerNorm without any weights, and queries, keys and values that are clipped."""
    config = model.config
    model.read(norm=NormKind(1e-5, "layer", has_weight=False))
    attend = attention(bias=config.flag("attention_bias"), clip=float(config.get("clip_qkv") or 0.0))
    decoder(model, attend, feed_forward())


@family("olmo2", "olmo3", "exaone4", "exaone4_5_text")
def olmo2(model: Builder) -> None:
    """OLMo norms all queries together, EXAONE each by itself; OLMo 3 and EXAONE have windows.

    EXAONE rotates only in its windows, if it has any.
    """
    config, kind, is_exaone = model.config, model.kind, model.kind.startswith("exaone")
    model.read(has_rotary=False)
    windows = [0] * model.num_layers if kind == "olmo2" else _optional_windows(model)
    if kind == "olmo3":
        rotaries = model.read_rotaries(windows, config.default("rope_theta"))
    else:
        rotaries = [model.read_rotary()] * model.num_layers
    is_rotated = [not is_exaone or bool(window) or not any(windows) for window in windows]
    attend = attention(
        bias=config.flag("attention_bias"), window=windows, norms=head_norms() if is_exaone else row_norms,
        rotary=[one if rotated else None for one, rotated in zip(rotaries, is_rotated, strict=True)],
        after="post_attention_layernorm",
    )  # fmt: skip
    decoder(model, attend, feed_forward(after="post_feedforward_layernorm"), norms=("", ""))


def _optional_windows(model: Builder) -> list[int]:
    config = model.config
    if config.get("sliding_window") is None:
        config.ignore("sliding_window_pattern", "layer_types")
        return [0] * model.num_layers
    pattern = config.get("sliding_window_pattern")
    period = pattern if isinstance(pattern, int) else 4  # a word beside `layer_types`, which count
    return model.windows(every(period, model.num_layers))


@family("cohere", "cohere2")
def cohere(model: Builder) -> None:
    """LayerNorm without bias, neighbours are rotated, logits scaled. Cohere 2 rotates only in its windows."""
    config, is_second = model.config, model.kind == "cohere2"
    model.read(norm=NormKind(config.get("layer_norm_eps"), "layer"), is_interleaved=True)
    kinds = every(config.whole("sliding_window_pattern", 4), model.num_layers)
    windows = model.windows(kinds) if is_second else [0] * model.num_layers
    has_norms = not is_second and config.flag("use_qk_norm")
    attend = attention(
        bias=config.flag("attention_bias"), window=windows, norms=_norms if has_norms else None,
        rotary=[model.rotary if window or not is_second else None for window in windows],
    )  # fmt: skip
    factor = 1.0 if config.is_wrapped else config.number("logit_scale")  # models with pictures do not scale logits
    decoder(model, attend, feed_forward(), norms=("input_layernorm", None), factor=factor)


def _norms(layer: Layer, sizes: HeadSizes) -> HeadNorms:
    """Each head has weights of its own."""

    def norm(part: str, heads: int) -> Norm:
        rows, kind = deinterleaved(heads, sizes.head_dim, sizes.rotary_dim), layer.model.norm
        name = f"{layer.prefix}self_attn.{part}_norm.weight"
        return Norm(kind.kind, kind.eps, (Weight(name, (heads, sizes.head_dim), is_flat=True, rows=rows),))

    return HeadNorms(norm("q", sizes.heads), norm("k", sizes.kv_heads))


@family("phi3")
def phi3(model: Builder) -> None:
    """Queries, keys and values are one matrix, too. A context with long frequencies ends where the first one did."""
    model.read(aliases={"su": "longrope", "yarn": "longrope"})
    attend = attention(qkv="qkv_proj", window=int(model.config.get("sliding_window") or 0))
    decoder(model, attend, feed_forward(names=STACKED))


@family("glm", "glm4", "glm4v_text", "glm_ocr_text")
def glm(model: Builder) -> None:
    """A part of each head is rotated, neighbours together. Those after the first have norms after each part, too."""
    kind, bias = model.kind, model.config.flag("attention_bias")
    bias = {"glm4v_text": True, "glm_ocr_text": False}.get(kind, bias)
    model.read(has_rotary=False, is_interleaved=True)
    rotary = read_rotary(model.config, model.sizes.head_dim, part=1.0)
    model.rotary, model.sizes = model.add_rotary(rotary), replace(model.sizes, rotary_dim=2 * len(rotary.inv_freq))
    after = ("", "") if kind == "glm" else ("post_self_attn_layernorm", "post_mlp_layernorm")
    attend = attention(qkv_bias=bias, after=after[0])
    decoder(model, attend, feed_forward(names=STACKED, after=after[1]))
