"""How a declaration is registered by its `model_type`, and what most have in common: settings and parts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cbatch.model.families.builder import Builder, HeadSizes, Layer, NormKind
from cbatch.model.families.rotary import read_rotary
from cbatch.model.ops.all import Activation, HeadNorms, Norm, Weight

Declaration = Callable[[Builder], None]

_declarations: dict[str, Declaration] = {}


def family(*kinds: str) -> Callable[[Declaration], Declaration]:
    """Registers a declaration for the models of these types."""

    def register(declaration: Declaration) -> Declaration:
        _declarations.update(dict.fromkeys(kinds, declaration))
        return declaration

    return register


def declaration_of(kind: str) -> Declaration | None:
    return _declarations.get(kind)


def declared_kinds() -> list[str]:
    """Every `model_type` that has a declaration."""
    return sorted(_declarations)


Part = Callable[[Layer, str], object]
"""A part of a layer, given the buffer that it reads, whose result is added to the residual."""


MakeNorms = Callable[[Layer], HeadNorms]
"""Makes the norms of queries and keys of a layer."""


def read_common(
    model: Builder,
    *,
    eps: float | None = None,
    theta: float = 1e4,
    part: float | None = None,
    activation: str = "silu",
    gated: bool = True,
    **sizes: Any,
) -> tuple[NormKind, HeadSizes, int, Activation]:
    """The RMS norm, the heads, their rotary setting, and the activation of a model.

    eps, theta, activation: of files that do not say it; a file must say `rms_norm_eps` if `eps` is None
    part:                   see `read_rotary`
    sizes:                  see `Builder.head_sizes`
    """
    config = model.config
    norm = NormKind(config["rms_norm_eps"] if eps is None else config.get("rms_norm_eps", eps))
    heads = model.head_sizes(**sizes)
    rotary = model.rotary(read_rotary(config, heads.head_dim, theta=theta, part=part))
    return norm, heads, rotary, model.activation("hidden_act", default=activation, gated=gated)


def attention(
    sizes: HeadSizes, *, bias: bool = False, after: tuple[NormKind, str] | None = None, **options: Any
) -> Part:
    """Attention in every layer; see `Layer.attention`.

    bias:    of all its linears
    after:   the norm of its result
    options: each may be a list with one value for each layer, or a function that makes it of the layer
    """
    options = {"qkv_bias": bias, "out_bias": bias} | options

    def own(layer: Layer, value: Any) -> Any:
        return value[layer.number] if isinstance(value, list) else value(layer) if callable(value) else value

    def add(layer: Layer, source: str) -> None:
        given = {name: own(layer, value) for name, value in options.items()}
        layer.attention(source, sizes, post_norm=None if after is None else norm_after(layer, *after), **given)

    return add


def feed_forward(activation: Activation, *, after: tuple[NormKind, str] | None = None, **options: Any) -> Part:
    """A feed-forward part of `intermediate_size`; see `Layer.feed_forward`. after: the norm of its result"""

    def add(layer: Layer, source: str) -> None:
        post_norm = None if after is None else norm_after(layer, *after)
        layer.feed_forward(source, layer.model.config["intermediate_size"], activation, post_norm=post_norm, **options)

    return add


def head_norms(norm: NormKind, sizes: HeadSizes, *names: tuple[str, str], last: bool = False) -> MakeNorms:
    """See `Layer.head_norms`."""
    return lambda layer: layer.head_norms(norm, sizes, *names, last=last)


def row_norms(norm: NormKind, sizes: HeadSizes) -> MakeNorms:
    """See `Layer.row_norms`."""
    return lambda layer: layer.row_norms(norm, sizes)


def sinks(sizes: HeadSizes) -> Callable[[Layer], Weight]:
    """A score of each head that carries no value."""
    return lambda layer: layer.weight("self_attn.sinks", sizes.heads)


def norm_after(layer: Layer, norm: NormKind, name: str) -> Norm | None:
    """The norm of a part's result; None without a name."""
    return layer.post_norm(norm, name) if name else None


def decoder(
    model: Builder,
    norm: NormKind,
    attend: Part,
    feed: Part,
    *,
    scale: float = 1.0,
    norms: tuple[str, str] = ("input_layernorm", "post_attention_layernorm"),
    final: str = "model.norm",
    norm_embedding: bool = False,
    **head: Any,
) -> None:
    """A decoder: in every layer a norm before attention (or what is in its place), and one before the next part.

    scale, norm_embedding: of the embedding
    norms: their names; an empty one: the part reads the residual as it is
    head:  see `Builder.head`
    """
    model.embed(scale=scale)
    if norm_embedding:
        model.norm_residual(norm)
    for layer in model.layers():
        for name, part in zip(norms, (attend, feed), strict=True):
            part(layer, layer.norm(norm, name) if name else layer.unnormed())
    model.head(norm(final, model.hidden_size), **head)


def every(period: int, count: int, *, at: int = -1) -> list[str]:
    """Types of layers: full attention in one of each `period`, by default the last, and windows in the others."""
    return ["full_attention" if i % period == at % period else "sliding_attention" for i in range(count)]


def sparse_by_type(kinds: Sequence[str]) -> list[bool]:
    """Which layers have experts, by `mlp_layer_types`."""
    return [kind == "sparse" for kind in kinds]
