"""Phi-3, GLM and GLM 4: gate and up in one matrix."""

from __future__ import annotations

from cbatch.model.families.builder import Builder, Layer, NormKind
from cbatch.model.families.decoder import attention, decoder, feed_forward
from cbatch.model.families.registry import family
from cbatch.model.families.rotary import read_rotary
from cbatch.model.ops.all import Matrix

_NAMES = ("gate_up_proj", "down_proj")


@family("phi3")
def phi3(model: Builder) -> None:
    """Queries, keys and values are one matrix, too. A context with long frequencies ends where the first one did."""
    config = model.config
    norm, sizes = NormKind(config["rms_norm_eps"]), model.head_sizes()
    rotary = model.rotary(read_rotary(config, sizes.head_dim, part=1.0, aliases={"su": "longrope", "yarn": "longrope"}))
    activation, window = model.activation("hidden_act", default="silu"), int(config.get("sliding_window") or 0)

    def qkv(layer: Layer) -> Matrix:
        return layer.matrix("self_attn.qkv_proj", sum(sizes.columns), model.hidden_size)

    attend = attention(sizes, qkv=qkv, rotary=rotary, window=window)
    decoder(model, norm, attend, feed_forward(activation, names=_NAMES))


@family("glm", "glm4")
def glm(model: Builder) -> None:
    """Half of each head is rotated, neighbours together. GLM 4 has norms after each part, too."""
    config, is_fourth = model.config, model.config.kind == "glm4"
    norm, part = NormKind(config["rms_norm_eps"]), 0.5
    head_dim = model.head_sizes().head_dim
    rotary = read_rotary(config, head_dim, part=part)
    sizes = model.head_sizes(part=2 * len(rotary.inv_freq) / head_dim, is_interleaved=True)
    index, bias = model.rotary(rotary), config.flag("attention_bias", True)
    activation = model.activation("hidden_act", default="silu")
    after = ("post_self_attn_layernorm", "post_mlp_layernorm") if is_fourth else ("", "")
    attend = attention(sizes, qkv_bias=bias, rotary=index, after=(norm, after[0]))
    decoder(model, norm, attend, feed_forward(activation, names=_NAMES, after=(norm, after[1])))
