"""Gemma: scaled embeddings, norms whose weights begin at 0, norms on both sides of each part."""

from __future__ import annotations

from cbatch.model.families.registry import family
from cbatch.model.programs.builder import Builder, NormKind
from cbatch.model.programs.rotary import read_rotary

WITH_PICTURES = (
    (("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")),
    (("model.", "model.language_model."),),
)
"""How files of models of text with pictures name the weights of the text model."""


@family("gemma")
def gemma(model: Builder) -> None:
    """The first one still has Llama's order."""
    config = model.config
    norm, sizes = NormKind(config["rms_norm_eps"], offset=1.0), model.head_sizes()
    rotary = model.rotary(read_rotary(config, sizes.head_dim))
    config.expect("hidden_act", "gelu_pytorch_tanh", "gelu")
    config.ignore("hidden_activation")
    config.expect("use_bidirectional_attention", None, False)
    activation, bias = model.activation(default="gelu_pytorch_tanh"), bool(config.get("attention_bias", False))
    model.embed(scale=model.hidden_size**0.5)
    for layer in model.layers():
        layer.attention(layer.norm(norm, "input_layernorm"), sizes, qkv_bias=bias, out_bias=bias, rotary=rotary)
        source = layer.norm(norm, "post_attention_layernorm")
        layer.feed_forward(source, config["intermediate_size"], activation)
    model.head(norm("model.norm", model.hidden_size), tied_by_default=True)


@family("gemma2", "vaultgemma", "gemma3", "gemma3_text")
def gemma2(model: Builder) -> None:
    """Windows in most layers, softcaps, and norms after each part, which VaultGemma leaves out again.

    Gemma 3 has norms of queries and keys instead of the softcap of scores, and other rotations in its windows.
    """
    config, kind, hidden = model.config, model.config.kind, model.hidden_size
    is_third, has_post_norms = kind.startswith("gemma3"), kind != "vaultgemma"
    norm, sizes = NormKind(config.get("rms_norm_eps", 1e-6), offset=1.0), model.head_sizes()
    period = int(config.get("sliding_window_pattern", 6)) if is_third else 2
    windows = model.windows(["sliding_attention" if (i + 1) % period else "full_attention" for i in model.numbers])
    rotaries = {bool(window): _rotary(model, sizes.head_dim, bool(window)) for window in windows}
    activation, bias = (
        model.activation("hidden_activation", default="gelu_pytorch_tanh"),
        bool(config.get("attention_bias", False)),
    )
    config.expect("use_bidirectional_attention", None, False)
    config.ignore("hidden_act", "cache_implementation", "_sliding_window_pattern", "image_token_index")
    scale = float(config.get("query_pre_attn_scalar", 256)) ** -0.5
    softcap = config.get("attn_logit_softcapping", None if is_third else 50.0)
    final_softcap = config.get("final_logit_softcapping", None if is_third else 30.0)
    model.embed(scale=hidden**0.5)
    for layer, window in zip(model.layers(), windows, strict=True):
        post_norms = [layer.post_norm(norm, f"post_{part}_layernorm") for part in ("attention", "feedforward")]
        layer.attention(
            layer.norm(norm, "input_layernorm"),
            sizes,
            qkv_bias=bias,
            out_bias=bias,
            rotary=rotaries[bool(window)],
            scale=scale,
            window=window,
            softcap=None if is_third else softcap,
            post_norm=post_norms[0] if has_post_norms else None,
            norms=layer.head_norms(norm, sizes) if is_third else None,
        )
        source = layer.norm(norm, "pre_feedforward_layernorm")
        post_norm = post_norms[1] if has_post_norms else None
        layer.feed_forward(source, config["intermediate_size"], activation, post_norm=post_norm)
    if kind == "gemma3":  # a model of text with pictures, whose head has no softcap
        model.layouts = WITH_PICTURES
        image = config.get("image_token_index", config.get("image_token_id"))
        model.replaced_ids = {int(image): 0} if image is not None and int(image) >= model.vocab_size else {}
        model.spare.append(r"(model\.)?(vision_tower|multi_modal_projector)\..*")
        final_softcap = None
    model.head(norm("model.norm", hidden), tied_by_default=True, softcap=final_softcap)


def _rotary(model: Builder, head_dim: int, is_windowed: bool) -> int:
    """Older files of Gemma 3 name the base of each type of layer, and scale that of full attention only."""
    config = model.config
    if not config.kind.startswith("gemma3"):
        return model.rotary(read_rotary(config, head_dim))
    if is_windowed:
        given = config.get("rope_parameters") or {}
        settings = given.get("sliding_attention", {"rope_theta": config.get("rope_local_base_freq", 1e4)})
        return model.rotary(read_rotary(config, head_dim, settings=settings))
    config.ignore("rope_local_base_freq")
    return model.rotary(read_rotary(config, head_dim, layer_type="full_attention", theta=1e6))
