"""How a declaration is registered by its `model_type`, and the parts of which most decoders are made."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from cbatch.model.config import ConfigReader
from cbatch.model.families.builder import Builder, HeadSizes, Layer, NormKind, deinterleaved
from cbatch.model.ops.all import (
    RESIDUAL,
    Activation,
    AddImage,
    Attend,
    Gate,
    Gather,
    HeadNorms,
    Linear,
    Matrix,
    Norm,
    PrepareHeads,
    Weight,
)

Declaration = Callable[[Builder], None]

declarations: dict[str, Declaration] = {}
"""By every `model_type` that has one."""


def family(*kinds: str) -> Callable[[Declaration], Declaration]:
    """Registers a declaration for the models of these types."""

    def register(declaration: Declaration) -> Declaration:
        declarations.update(dict.fromkeys(kinds, declaration))
        return declaration

    return register


Part = Callable[[Layer, str], object]
"""A part of a layer, given the buffer that it reads, whose result is added to the residual."""

MakeNorms = Callable[[Layer, HeadSizes], HeadNorms | None]
"""Makes the norms of queries and keys of a layer."""


MakeQkv = Callable[[Layer, HeadSizes], Matrix]
"""Makes the matrix of queries, keys and values side by side."""

MakeGate = Callable[[Layer, str, HeadSizes], Gate]
"""Makes the gate of what attention gives, of the buffer that a layer reads."""


def attention(
    *, sizes: HeadSizes | Sequence[HeadSizes] | None = None, prefix: str = "self_attn.",
    qkv: MakeQkv | str | None = None, out: str = "o_proj", transpose: bool = False, bias: bool = False,
    qkv_bias: bool | None = None, out_bias: bool | None = None, rotary: Sequence[int | None] | None = None,
    scale: float | Sequence[float] | None = None, window: int | Sequence[int] = 0, chunk: int | Sequence[int] = 0,
    softcap: float | None = None, has_sinks: bool | Sequence[bool] = False, sinks: str = "sinks", factor: float = 1.0,
    after: str = "", gate: MakeGate | None = None, norms: MakeNorms | None = None,
    clip: float = 0.0, shared_cache: Sequence[int | None] | None = None, is_ready: bool = False,
) -> Part:  # fmt: skip
    """Self-attention. What is a sequence has one value for each layer.

    sizes, rotary: those of the model by default
    qkv:   by default q_proj, k_proj and v_proj; or the name of the one linear that gives all of them
    out, transpose: the last linear; whether that, and the one that `qkv` names, are stored as [depth, columns]
    bias:  of all linears, unless `qkv_bias` or `out_bias` say otherwise
    has_sinks, sinks: a score of each head carries no value; the name of these scores
    after: the name of the norm of its result
    norms, clip: see `PrepareHeads`
    shared_cache: number of the cache of an earlier layer, instead of one of its own; `qkv` has queries only then
    is_ready: the buffer holds queries, keys and values side by side
    """

    def attend(layer: Layer, source: str) -> None:
        def own(value: Any) -> Any:
            return value[layer.number] if isinstance(value, Sequence) else value

        model, heads, reach = layer.model, own(sizes) or layer.model.sizes, own(window)
        shared, turn = own(shared_cache), model.rotary if rotary is None else own(rotary)
        gating = None if gate is None else gate(layer, source, heads)
        if not is_ready:
            own_bias = bias if qkv_bias is None else qkv_bias
            if isinstance(qkv, str):
                size = sum(heads.columns), model.hidden_size
                matrix = layer.matrix(prefix + qkv, *size, bias=own_bias, transpose=transpose)
            else:
                matrix = (qkv or separate_qkv(prefix, bias=own_bias))(layer, heads)
            model.add(Linear(source, "qkv", _reordered(matrix, heads) if heads.is_interleaved else matrix))
            source, (queries, keys, _) = "qkv", heads.columns
            if matrix.columns == queries + keys and shared is None:  # keys are values, too
                columns = torch.cat([torch.arange(queries + keys), torch.arange(queries, queries + keys)])
                model.add(Gather((source,), "heads", columns))
                source = "heads"
        shape = heads.cache
        cache = model.new_cache(shape, reach) if shared is None else shared
        normed = (norms(layer, heads) if norms else None) or HeadNorms()
        model.add(PrepareHeads(source, "query", heads.heads, shape, cache, shared is None, turn, normed, clip))
        scores = heads.head_dim**-0.5 if scale is None else own(scale)
        extra = layer.weight(prefix + sinks, heads.heads) if own(has_sinks) else None
        model.add(
            Attend("query", "attended", cache, heads.heads, shape, scores, reach, own(chunk), softcap or 0.0, extra)
        )
        if gating is not None:
            model.add(gating)
        has_bias, depth = bias if out_bias is None else out_bias, heads.heads * shape.value_dim
        last = layer.matrix(prefix + out, model.hidden_size, depth, bias=has_bias, transpose=transpose)
        layer.add_to_residual("attended", last, factor=factor, after=after)

    return attend


def separate_qkv(prefix: str = "self_attn.", *, bias: bool = False) -> MakeQkv:
    """The linears q_proj, k_proj and v_proj."""
    names = [f"{prefix}{part}_proj" for part in "qkv"]
    return lambda layer, sizes: layer.matrix(names, sizes.columns, layer.model.hidden_size, bias=bias)


def _reordered(qkv: Matrix, sizes: HeadSizes) -> Matrix:
    """The linears of queries and keys, which come first, with the rows of each head in the order of halves."""
    orders = [deinterleaved(heads, sizes.head_dim, sizes.rotary_dim) for heads in (sizes.heads, sizes.kv_heads)]

    def reorder(parts: tuple[Weight, ...]) -> tuple[Weight, ...]:
        return tuple(replace(part, rows=order) for part, order in zip(parts, [*orders, None], strict=bool(parts)))

    return Matrix(reorder(qkv.parts), reorder(qkv.biases))


LAYERNORMS = "self_attn.q_layernorm", "self_attn.k_layernorm"


def head_norms(
    query: str = "self_attn.q_norm", key: str = "self_attn.k_norm", *, kind: NormKind | None = None, last: bool = False
) -> Callable[[Layer, HeadSizes], HeadNorms]:
    """Norms of each query and key by itself, with the same weights for all."""

    def norms(layer: Layer, sizes: HeadSizes) -> HeadNorms:
        dim = sizes.head_dim
        order = deinterleaved(1, dim, sizes.rotary_dim) if sizes.is_interleaved else torch.arange(dim)

        def norm(name: str, heads: int) -> Norm:
            one, rows = layer.norm_of(name, dim, kind), order.repeat(heads)
            weight, bias = (tuple(replace(each, rows=rows) for each in given) for given in (one.weight, one.bias))
            return replace(one, weight=weight, bias=bias)

        return HeadNorms(norm(query, sizes.heads), norm(key, sizes.kv_heads), last=last)

    return norms


def row_norms(layer: Layer, sizes: HeadSizes) -> HeadNorms:
    """Norms of all queries together, and of all keys."""
    queries, keys, _ = sizes.columns
    norm = layer.norm_of
    return HeadNorms(norm("self_attn.q_norm", queries), norm("self_attn.k_norm", keys), by_row=True)


def feed_forward(
    *, size: int | None = None, prefix: str = "mlp.", names: tuple[str, ...] | None = None, bias: bool = False,
    transpose: bool = False, activation: Activation | None = None, factor: float = 1.0, after: str = "",
    target: str = RESIDUAL, add: bool = True, gate_factor: float = 1.0,
) -> Part:  # fmt: skip
    """A feed-forward part of `intermediate_size`, whose result is added to the residual, or to another target.

    names: of the linears up to the activation, side by side, and of the one after it
    after: the name of the norm of its result
    gate_factor: of what goes into the activation
    """

    def feed(layer: Layer, source: str) -> None:
        model, function = layer.model, activation or layer.model.activation
        inner, hidden = model.config["intermediate_size"] if size is None else size, model.hidden_size
        given = names or (("gate_proj", "up_proj", "down_proj") if function.gated else ("up_proj", "down_proj"))
        *first, last = (prefix + name for name in given)
        columns = [(1 + function.gated) * inner // len(first)] * len(first)
        up = layer.matrix(first, columns, hidden, bias=bias, transpose=transpose)
        parts, biases = (
            tuple(replace(one, factor=gate_factor) for one in each[:1]) + each[1:] for each in (up.parts, up.biases)
        )
        down = layer.matrix(last, hidden, inner, bias=bias, transpose=transpose)
        model.add(Linear(source, "intermediate", Matrix(parts, biases), activation=function))
        if target == RESIDUAL:
            layer.add_to_residual("intermediate", down, factor=factor, after=after)
        else:
            model.add(Linear("intermediate", target, down, add=add, factor=factor))

    return feed


def mixture(
    model: Builder, router: Mapping[str, Any], *, size: int | None = None, num_shared: int = 0, shared: int = 0,
    shared_prefix: str = "mlp.shared_experts.", shared_bias: bool = False, beside: Part | None = None,
    sparse: Sequence[bool] | None = None, dense: Part | None = None, after: str = "", **options: Any,
) -> Part:  # fmt: skip
    """Experts of `size` numbers, and a feed-forward part for all tokens beside them.

    router:  see `Layer.route`
    size:    `moe_intermediate_size` by default
    num_shared: how many experts' size the part beside them has, 0 for none; or `shared` is its size, or it is `beside`
    sparse:  which layers have experts; the others have `dense`, by default a feed-forward part
    after:   the name of the norm of their sum
    options: see `Layer.experts`
    """
    target, plain = "added" if after else RESIDUAL, dense or feed_forward(after=after)
    experts, size = num_experts(model.config), model.config.whole("moe_intermediate_size") if size is None else size
    if shared := shared or num_shared * size:
        beside = feed_forward(size=shared, prefix=shared_prefix, bias=shared_bias, target=target)

    def feed(layer: Layer, source: str) -> None:
        if sparse is not None and not sparse[layer.number]:
            plain(layer, source)
            return
        layer.experts(source, experts, layer.route(source, experts, **router), size, target=target, **options)
        if beside is not None:
            beside(layer, source)
        if after:
            layer.add_normed(after)

    return feed


def num_experts(config: ConfigReader) -> int:
    """By the names that classes have for it."""
    return int(config.first("n_routed_experts", "moe_num_experts", "num_experts", "num_local_experts"))


def side_by_side(first: Part, second: Part, norm: str) -> tuple[Part, Part]:
    """Two parts that read the same residual, of which the second has a norm of its own, of this name."""

    def before(layer: Layer, source: str) -> None:
        layer.norm(norm, target="normed_too")
        first(layer, source)

    return before, lambda layer, source: second(layer, "normed_too")


def by_kind(kinds: Sequence[str], **parts: Part) -> Part:
    """The part of a layer's kind."""
    return lambda layer, source: parts[kinds[layer.number]](layer, source)


def decoder(
    model: Builder, *parts: Part, norms: Sequence[str | None] = ("input_layernorm", "post_attention_layernorm"),
    root: str = "model.", embed: str = "embed_tokens", layers: str = "layers", final: str = "norm", scale: float = 1.0,
    positions: str = "", offset: int = 0, before: Callable[[], None] | None = None, **head: Any,
) -> None:  # fmt: skip
    """A decoder: an embedding, in every layer a norm before each part, and a head.

    norms:  their names; an empty one: the part reads the residual as it is; None: it reads what the one before reads
    root, embed, layers, final: names of weights, the first of which is the beginning of the others
    scale, positions, offset: see `Builder.embed`
    before: adds what stands before the layers
    head:   see `Builder.head`
    """
    model.root = root
    model.embed(root + embed, scale, positions and root + positions, offset)
    if before is not None:
        before()
    source, levels = "", model.config.whole("deepstack_levels", 0)
    for number in model.numbers:
        layer = Layer(model, number, f"{root}{layers}.{number}.")
        for name, part in zip(norms, parts, strict=True):
            source = source if name is None else layer.norm(name)
            part(layer, source)
        if number < levels:
            model.add(AddImage(number))
    model.head(root + final, **head)


def every(period: int, count: int, *, at: int = -1) -> list[str]:
    """Types of layers: full attention in one of each `period`, by default the last, and windows in the others."""
    return ["full_attention" if i % period == at % period else "sliding_attention" for i in range(count)]
