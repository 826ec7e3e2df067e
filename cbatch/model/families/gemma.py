"""Gemma: scaled embeddings, norms whose weights begin at 0, norms on both sides of each part."""

from __future__ import annotations

from cbatch.model.families.builder import Builder, NormKind
from cbatch.model.families.decoder import attention, decoder, every, family, feed_forward, head_norms
from cbatch.model.families.rotary import read_rotary

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
    feed, bias = feed_forward(model.activation(default="gelu_pytorch_tanh")), config.flag("attention_bias")
    attend = attention(sizes, bias=bias, rotary=rotary)
    decoder(model, norm, attend, feed, scale=model.hidden_size**0.5, tied_by_default=True)


@family("gemma2", "vaultgemma", "gemma3", "gemma3_text")
def gemma2(model: Builder) -> None:
    """Windows in most layers, softcaps, and norms after each part, which VaultGemma leaves out again.

    Gemma 3 has norms of queries and keys instead of the softcap of scores, and other rotations in its windows.
    """
    config, kind = model.config, model.config.kind
    is_third = kind.startswith("gemma3")
    after = ("", "") if kind == "vaultgemma" else ("post_attention_layernorm", "post_feedforward_layernorm")
    norm, sizes = NormKind(config.get("rms_norm_eps", 1e-6), offset=1.0), model.head_sizes()
    windows = model.windows(every(config.whole("sliding_window_pattern", 6) if is_third else 2, model.num_layers))
    rotaries = {bool(window): _rotary(model, sizes.head_dim, bool(window)) for window in windows}
    activation = model.activation("hidden_activation", default="gelu_pytorch_tanh")
    bias = config.flag("attention_bias")
    config.expect("use_bidirectional_attention", None, False)
    config.ignore("hidden_act", "cache_implementation", "_sliding_window_pattern", "image_token_index")
    scale = config.number("query_pre_attn_scalar", 256) ** -0.5
    softcap = config.get("attn_logit_softcapping", None if is_third else 50.0)
    final_softcap = config.get("final_logit_softcapping", None if is_third else 30.0)
    if kind == "gemma3":  # a model of text with pictures, whose head has no softcap
        model.layouts = WITH_PICTURES
        image = config.get("image_token_index", config.get("image_token_id"))
        model.replaced_ids = {int(image): 0} if image is not None and int(image) >= model.vocab_size else {}
        model.spare.append(r"(model\.)?(vision_tower|multi_modal_projector)\..*")
        final_softcap = None
    attend = attention(
        sizes, bias=bias, rotary=[rotaries[bool(window)] for window in windows], scale=scale,
        window=windows, softcap=None if is_third else softcap, norms=head_norms(norm, sizes) if is_third else None,
        after=(norm, after[0]),
    )  # fmt: skip
    decoder(
        model, norm, attend, feed_forward(activation, after=(norm, after[1])), scale=model.hidden_size**0.5,
        norms=("input_layernorm", "pre_feedforward_layernorm"), tied_by_default=True, softcap=final_softcap,
    )  # fmt: skip


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
