"""Phi-3, GLM and GLM 4: gate and up in one matrix."""

from __future__ import annotations

from cbatch.model.families.registry import family
from cbatch.model.programs.builder import Builder, NormKind
from cbatch.model.programs.rotary import read_rotary


@family("phi3")
def phi3(model: Builder) -> None:
    """Queries, keys and values are one matrix, too. A context with long frequencies ends where the first one did."""
    config = model.config
    norm, sizes = NormKind(config["rms_norm_eps"]), model.head_sizes()
    rotary = model.rotary(read_rotary(config, sizes.head_dim, part=1.0, aliases={"su": "longrope", "yarn": "longrope"}))
    activation, window = model.activation("hidden_act", default="silu"), int(config.get("sliding_window") or 0)
    model.embed()
    for layer in model.layers():
        source = layer.norm(norm, "input_layernorm")
        qkv = layer.matrix("self_attn.qkv_proj", sum(sizes.columns), model.hidden_size)
        layer.attention(source, sizes, qkv=qkv, rotary=rotary, window=window)
        source = layer.norm(norm, "post_attention_layernorm")
        layer.feed_forward(source, config["intermediate_size"], activation, names=("gate_up_proj", "down_proj"))
    model.head(norm("model.norm", model.hidden_size))


@family("glm", "glm4")
def glm(model: Builder) -> None:
    """Half of each head is rotated, neighbours together. GLM 4 has norms after each part, too."""
    config, is_fourth = model.config, model.config.kind == "glm4"
    norm, part = NormKind(config["rms_norm_eps"]), 0.5
    head_dim = model.head_sizes().head_dim
    rotary = read_rotary(config, head_dim, part=part)
    sizes = model.head_sizes(part=2 * len(rotary.inv_freq) / head_dim, is_interleaved=True)
    index, bias = model.rotary(rotary), bool(config.get("attention_bias", True))
    activation = model.activation("hidden_act", default="silu")
    model.embed()
    for layer in model.layers():
        source = layer.norm(norm, "input_layernorm")
        post_norms = [
            layer.post_norm(norm, f"post_{name}_layernorm") if is_fourth else None for name in ("self_attn", "mlp")
        ]
        layer.attention(source, sizes, qkv_bias=bias, rotary=index, post_norm=post_norms[0])
        source = layer.norm(norm, "post_attention_layernorm")
        layer.feed_forward(
            source,
            config["intermediate_size"],
            activation,
            names=("gate_up_proj", "down_proj"),
            post_norm=post_norms[1],
        )
    model.head(norm("model.norm", model.hidden_size))
