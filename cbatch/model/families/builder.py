"""The builder of declarations: each call adds operations to the program of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from cbatch.model.config import ConfigReader, UnsupportedConfig
from cbatch.model.ops.all import (
    RESIDUAL,
    Activation,
    Attend,
    Embed,
    Experts,
    Gate,
    Gather,
    Head,
    HeadNorms,
    Layout,
    Linear,
    Matrix,
    Norm,
    Normalize,
    Operation,
    PrepareHeads,
    Program,
    Rotary,
    Route,
    Weight,
)
from cbatch.runtime.kv_cache import LayerShape
from cbatch.runtime.state_pool import StateShape

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "relu2": "relu2", "sigmoid": "sigmoid",
}  # fmt: skip
"""Names in config files, and what they are called here."""

STACKED = "gate_up_proj", "down_proj"
"""Most names of stacked experts; see `Layer.experts`."""

_MOST_LAYERS, _MOST_EXPERTS, _MOST_COLUMNS, _MOST_TOKENS = 2**10, 2**12, 2**20, 2**24
_MOST_EXPERTS_IN_ALL = 2**15
"""Sizes that no model comes near: what a config.json says costs memory before its weights are compared with it."""


@dataclass(frozen=True, slots=True)
class NormKind:
    """A norm whose weights are still to be named.

    offset:     added to its weight
    has_weight, has_bias: which of them the files hold
    """

    eps: float
    kind: Literal["rms", "layer"] = "rms"
    offset: float = 0.0
    has_weight: bool = True
    has_bias: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.eps, int | float):
            raise UnsupportedConfig(f"the epsilon of its norms is {self.eps!r}")

    def __call__(self, name: str, *shape: int) -> Norm:
        """With the weights `name`.weight and `name`.bias."""
        weight, bias = Weight(f"{name}.weight", shape, offset=self.offset), Weight(f"{name}.bias", shape)
        return Norm(self.kind, self.eps, (weight,) if self.has_weight else (), (bias,) if self.has_bias else ())


@dataclass(frozen=True, slots=True)
class HeadSizes:
    """The heads of a layer.

    rotary_dim: numbers of each head that are rotated; the first ones
    is_interleaved: neighbours are rotated together, and not number i with i + rotary_dim / 2
    """

    heads: int
    kv_heads: int
    head_dim: int
    value_dim: int = 0
    rotary_dim: int = 0
    is_interleaved: bool = False

    def __post_init__(self) -> None:
        heads = max(self.heads, self.kv_heads)
        _check_sizes(_MOST_COLUMNS, heads, heads * self.head_dim, heads * self.value_dim, self.rotary_dim)

    @property
    def cache(self) -> LayerShape:
        return LayerShape(self.kv_heads, self.head_dim, self.value_dim or self.head_dim)

    @property
    def columns(self) -> tuple[int, int, int]:
        """Of queries, keys and values."""
        cache = self.cache
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * cache.value_dim


def _check_sizes(most: int, *sizes: int) -> None:
    if max(sizes) > most:
        raise UnsupportedConfig(f"its config.json has a size of {max(sizes)}, and {most} are the most")


def deinterleaved(heads: int, head_dim: int, rotary_dim: int) -> Tensor:
    """Indices of `heads * head_dim` numbers: of each head's rotated ones, which are first, the even ones come first."""
    order = torch.arange(head_dim)
    order[:rotary_dim] = torch.arange(rotary_dim).view(-1, 2).T.flatten()
    return (torch.arange(heads)[:, None] * head_dim + order).flatten()


def rows_of(matrix: Matrix, rows: Tensor) -> Matrix:
    """Some rows of a matrix that is one linear."""
    parts, biases = ([replace(one, rows=rows) for one in each] for each in (matrix.parts, matrix.biases))
    return Matrix(tuple(parts), tuple(biases))


class Builder:
    """Collects the operations of one model.

    Raises UnsupportedConfig for sizes that no model can have.
    """

    def __init__(self, config: ConfigReader) -> None:
        self.config = config
        self.hidden_size = int(config.first("hidden_size", "n_embd"))
        self.vocab_size = int(config["vocab_size"])
        kinds = config.values.get("layers_block_type")  # which some files have instead of a number
        self.num_layers = len(kinds) if kinds else int(config.first("num_hidden_layers", "n_layer"))
        _check_sizes(_MOST_COLUMNS, self.hidden_size)
        _check_sizes(_MOST_TOKENS, self.vocab_size)
        _check_sizes(_MOST_LAYERS, self.num_layers)
        self.max_model_len = int(config.first("max_position_embeddings", "n_positions"))
        self.is_tied = False
        self.replaced_ids: dict[int, int] = {}
        self.layouts: tuple[Layout, ...] = ()
        self.spare: list[str] = [r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)"]
        self._operations: list[Operation] = []
        self._caches: list[LayerShape] = []
        self._windows: list[int | None] = []
        self._rotaries: list[Rotary] = []
        self._states: list[StateShape] = []
        config.expect("quantization_config", None)

    @property
    def numbers(self) -> range:
        """Of the layers."""
        return range(self.num_layers)

    def add(self, operation: Operation) -> None:
        self._operations.append(operation)

    @property
    def top_k(self) -> int:
        """Experts of a token, by the last router."""
        return next(one.top_k for one in reversed(self._operations) if isinstance(one, Route))

    def program(self) -> Program:
        architectures = self.config.get("architectures") or [self.config.kind]
        if min(self.num_layers, self.hidden_size, self.vocab_size, self.max_model_len) < 1:
            raise UnsupportedConfig("one of its sizes is not positive")
        return Program(
            name=str(architectures[0]),
            kind=self.config.kind,
            hidden_size=self.hidden_size,
            vocab_size=self.vocab_size,
            max_model_len=self.max_model_len,
            operations=tuple(self._operations),
            caches=tuple(self._caches),
            windows=tuple(self._windows),
            rotaries=tuple(self._rotaries),
            embedding=self._embedding,
            head=self._head,
            is_tied=self.is_tied,
            replaced_ids=self.replaced_ids,
            layouts=self.layouts,
            spare=tuple(self.spare),
            states=tuple(self._states),
        )

    def head_sizes(
        self,
        *,
        kv_heads: int | None = None,
        part: float = 1.0,
        is_interleaved: bool = False,
        head_dim: int | None = None,
    ) -> HeadSizes:
        """As most configurations give them.

        part:     of each head that is rotated
        head_dim: of files that do not say it; by default heads share the hidden size
        """
        config = self.config
        heads = int(config.first("num_attention_heads", "n_head"))
        head_dim = int(config.get("head_dim") or head_dim or self.hidden_size // heads)
        kv_heads = kv_heads or int(config.get("num_key_value_heads") or heads)
        if heads % kv_heads or min(heads, kv_heads, head_dim) < 1:
            raise UnsupportedConfig(f"its {heads} query heads cannot share {kv_heads} KV heads")
        return HeadSizes(heads, kv_heads, head_dim, head_dim, int(head_dim * part), is_interleaved)

    def rotary(self, rotary: Rotary) -> int:
        """The number of a rotary setting, which is added if it is new."""
        if rotary not in self._rotaries:
            self._rotaries.append(rotary)
        return self._rotaries.index(rotary)

    def activation(self, *keys: str, default: str | None = None, gated: bool = True) -> Activation:
        """As the first of these keys names it."""
        name = next((found for key in keys if (found := self.config.get(key)) is not None), default)
        if name not in ACTIVATIONS:
            raise UnsupportedConfig(f"its activation is {name}")
        return Activation(ACTIVATIONS[name], gated)

    def windows(self, default_kinds: Sequence[str] | None = None, *, window: int | None = None) -> list[int]:
        """The window of each layer by `layer_types`, 0 for none. window: `sliding_window` of the config by default"""
        kinds = self.layer_types(default_kinds or ["full_attention"] * self.num_layers)
        if "sliding_attention" not in kinds:
            self.config.ignore("sliding_window")
            return [0] * self.num_layers
        size = int(self.config["sliding_window"]) if window is None else window
        return [size if kind == "sliding_attention" else 0 for kind in kinds]

    def layer_types(
        self, default: Sequence[str], known: Sequence[str] = ("full_attention", "sliding_attention")
    ) -> list[str]:
        kinds = list(self.config.get("layer_types") or default)
        if not set(kinds) <= set(known) or len(kinds) != self.num_layers:
            raise UnsupportedConfig("it has layers of other types")
        return kinds

    def embed(
        self, name: str = "model.embed_tokens", scale: float = 1.0, positions: str | None = None, offset: int = 0
    ) -> None:
        """Tokens, times `scale`, and maybe learned positions, which begin in row `offset` of their table."""
        self._embedding = Weight(f"{name}.weight", (self.vocab_size, self.hidden_size))
        size = self.max_model_len + offset, self.hidden_size
        table = None if positions is None else Weight(f"{positions}.weight", size)
        self.add(Embed(self._embedding, scale, table, offset))

    def norm_residual(self, kind: NormKind) -> None:
        """Replaces the residual by its norm, which has no weights."""
        self.add(Normalize(RESIDUAL, RESIDUAL, Norm(kind.kind, kind.eps)))

    def layers(self, prefix: str = "model.layers") -> Iterator[Layer]:
        for number in range(self.num_layers):
            yield Layer(self, number, f"{prefix}.{number}.")

    def head(
        self,
        norm: Norm,
        name: str = "lm_head",
        *,
        tied_by_default: bool = False,
        bias: bool = False,
        factor: float = 1.0,
        softcap: float | None = None,
    ) -> None:
        """The output head, which is the embedding if `tie_word_embeddings` says so.

        tied_by_default: if the file does not say
        """
        self.is_tied = bool(self.config.get("tie_word_embeddings", tied_by_default))
        weight = Weight(f"{name}.weight", (self.vocab_size, self.hidden_size))
        biases = (Weight(f"{name}.bias", (self.vocab_size,)),) if bias else ()
        matrix = Matrix((self._embedding if self.is_tied else weight,), biases)
        self._head = matrix
        self.add(Head(norm, matrix, factor, softcap or 0.0))

    def new_cache(self, shape: LayerShape, window: int) -> int:
        self._caches.append(shape)
        self._windows.append(window or None)
        return len(self._caches) - 1

    def new_state(self, *shape: int) -> int:
        """The number of a state of a recurrent layer."""
        self._states.append(StateShape(shape, torch.float32))
        return len(self._states) - 1


@dataclass(frozen=True)
class Layer:
    """One layer of a model.

    prefix: of the names of its weights
    """

    model: Builder
    number: int
    prefix: str

    def weight(self, name: str, *shape: int) -> Weight:
        return Weight(self.prefix + name, shape)

    def matrix(
        self,
        names: str | Sequence[str],
        columns: int | Sequence[int],
        depth: int,
        *,
        bias: bool = False,
        transpose: bool = False,
    ) -> Matrix:
        """The matrix of linears side by side, by their names. transpose: they are stored as [depth, columns]"""
        names = [names] if isinstance(names, str) else names
        sizes = [columns] if isinstance(columns, int) else columns
        pairs = list(zip(names, sizes, strict=True))
        parts = [
            Weight(f"{self.prefix}{name}.weight", (depth, size) if transpose else (size, depth), transpose=transpose)
            for name, size in pairs
        ]
        return Matrix(tuple(parts), tuple(self.weight(f"{name}.bias", size) for name, size in pairs) if bias else ())

    def norm(
        self, kind: NormKind, name: str, *, source: str = RESIDUAL, target: str = "normed", size: int | None = None
    ) -> str:
        """Norms a buffer; returns the name of the result."""
        size = size or self.model.hidden_size
        self.model.add(Normalize(source, target, kind(self.prefix + name, size), width=size))
        return target

    def unnormed(self) -> str:
        """The residual as it is, as a linear takes it."""
        self.model.add(Normalize(RESIDUAL, "normed", Norm("none", 0.0)))
        return "normed"

    def add_to_residual(
        self, source: str, matrix: Matrix, *, factor: float = 1.0, post_norm: Norm | None = None
    ) -> None:
        """residual += factor * post_norm(source times matrix)."""
        if post_norm is None:
            self.model.add(Linear(source, RESIDUAL, matrix, add=True, factor=factor))
        else:
            self.model.add(Linear(source, "added", matrix))
            self.add_normed(post_norm, factor=factor)

    def add_normed(self, norm: Norm, *, factor: float = 1.0) -> None:
        """residual += factor * norm(the buffer `added`)."""
        self.model.add(Normalize("added", RESIDUAL, norm, add=True, factor=factor))

    def post_norm(self, kind: NormKind, name: str) -> Norm:
        return kind(self.prefix + name, self.model.hidden_size)

    def attention(
        self,
        source: str,
        sizes: HeadSizes,
        *,
        qkv: Matrix | None = None,
        out: Matrix | None = None,
        qkv_bias: bool = False,
        out_bias: bool = False,
        rotary: int | None = None,
        scale: float | None = None,
        window: int = 0,
        chunk: int = 0,
        softcap: float | None = None,
        sinks: Weight | None = None,
        factor: float = 1.0,
        post_norm: Norm | None = None,
        gate: Gate | None = None,
        norms: HeadNorms | None = None,
        clip: float = 0.0,
        shared_cache: int | None = None,
        is_ready: bool = False,
    ) -> int:
        """Self-attention, whose result is added to the residual. Returns the number of its KV cache.

        qkv:   queries, keys and values side by side; by default self_attn.q_proj, k_proj and v_proj
        out:   after attention; by default self_attn.o_proj
        gate:  of what attention gives
        norms, clip: see `PrepareHeads`
        shared_cache: number of the cache of an earlier layer, instead of one of its own; `qkv` has queries only then
        is_ready: the source holds queries, keys and values side by side
        """
        model, shape, stores = self.model, sizes.cache, shared_cache is None
        if not is_ready:
            qkv = qkv or self.qkv(sizes, bias=qkv_bias)
            model.add(Linear(source, "qkv", _reordered(qkv, sizes) if sizes.is_interleaved else qkv))
            source, (queries, keys, _) = "qkv", sizes.columns
            if qkv.columns == queries + keys and stores:  # keys are values, too
                columns = torch.cat([torch.arange(queries + keys), torch.arange(queries, queries + keys)])
                model.add(Gather((source,), "heads", columns))
                source = "heads"
        cache = model.new_cache(shape, window) if shared_cache is None else shared_cache
        model.add(PrepareHeads(source, "query", sizes.heads, shape, cache, stores, rotary, norms or HeadNorms(), clip))
        scale = sizes.head_dim**-0.5 if scale is None else scale
        model.add(Attend("query", "attended", cache, sizes.heads, shape, scale, window, chunk, softcap or 0.0, sinks))
        if gate is not None:
            model.add(gate)
        out = out or self.out(sizes, bias=out_bias)
        self.add_to_residual("attended", out, factor=factor, post_norm=post_norm)
        return cache

    def qkv(self, sizes: HeadSizes, prefix: str = "self_attn.", *, bias: bool = False) -> Matrix:
        """The linears q_proj, k_proj and v_proj."""
        names = [f"{prefix}{part}_proj" for part in "qkv"]
        return self.matrix(names, sizes.columns, self.model.hidden_size, bias=bias)

    def out(self, sizes: HeadSizes, name: str = "self_attn.o_proj", *, bias: bool = False) -> Matrix:
        depth = sizes.heads * sizes.cache.value_dim
        return self.matrix(name, self.model.hidden_size, depth, bias=bias)

    def head_norms(
        self,
        kind: NormKind,
        sizes: HeadSizes,
        names: tuple[str, str] = ("self_attn.q_norm", "self_attn.k_norm"),
        *,
        last: bool = False,
    ) -> HeadNorms:
        """Norms of each query and key by itself, with the same weights for all."""
        query, key = names
        queries = self.head_norm(kind, query, sizes.heads, sizes)
        return HeadNorms(queries, self.head_norm(kind, key, sizes.kv_heads, sizes), last=last)

    def row_norms(self, kind: NormKind, sizes: HeadSizes) -> HeadNorms:
        """Norms of all queries together, and of all keys."""
        queries, keys, _ = sizes.columns
        prefix = self.prefix + "self_attn."
        return HeadNorms(kind(prefix + "q_norm", queries), kind(prefix + "k_norm", keys), by_row=True)

    def head_norm(self, kind: NormKind, name: str, heads: int, sizes: HeadSizes) -> Norm:
        norm, dim = kind(self.prefix + name, sizes.head_dim), sizes.head_dim
        order = deinterleaved(1, dim, sizes.rotary_dim) if sizes.is_interleaved else torch.arange(dim)
        rows = order.repeat(heads)
        return replace(
            norm,
            weight=tuple(replace(weight, rows=rows) for weight in norm.weight),
            bias=tuple(replace(bias, rows=rows) for bias in norm.bias),
        )

    def feed_forward(
        self,
        source: str,
        size: int,
        activation: Activation,
        *,
        prefix: str = "mlp.",
        names: tuple[str, ...] | None = None,
        bias: bool = False,
        factor: float = 1.0,
        post_norm: Norm | None = None,
        target: str = RESIDUAL,
        add: bool = True,
    ) -> None:
        """The feed-forward part, whose result is added to the residual, or to another target.

        names: of the linears up to the activation, side by side, and of the one after it
        """
        names = names or (("gate_proj", "up_proj", "down_proj") if activation.gated else ("up_proj", "down_proj"))
        *first, last = (prefix + name for name in names)
        columns = [(1 + activation.gated) * size // len(first)] * len(first)
        up = self.matrix(first, columns, self.model.hidden_size, bias=bias)
        down = self.matrix(last, self.model.hidden_size, size, bias=bias)
        self.model.add(Linear(source, "intermediate", up, activation=activation))
        if target == RESIDUAL:
            self.add_to_residual("intermediate", down, factor=factor, post_norm=post_norm)
        else:
            self.model.add(Linear("intermediate", target, down, add=add, factor=factor))

    def experts(
        self,
        source: str,
        num_experts: int,
        size: int,
        activation: Activation,
        *,
        prefix: str = "mlp.experts.",
        names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
        stacked: bool = False,
        transpose: bool = False,
        bias: bool = False,
        interleaved: bool = False,
        target: str = RESIDUAL,
        factor: float = 1.0,
        weigh_input: bool = False,
    ) -> None:
        """The experts of a layer, which are added to the residual.

        stacked: the files hold the matrices of all experts in one tensor, and those of each by itself otherwise
        transpose, bias, interleaved: of stacked ones: they are [depth, columns]; the names with `_bias` are theirs;
                 columns of gate and up take turns
        """
        _check_sizes(_MOST_EXPERTS, num_experts)
        _check_sizes(_MOST_EXPERTS_IN_ALL, num_experts * self.model.num_layers)
        hidden, both = self.model.hidden_size, (1 + activation.gated) * size
        _check_sizes(_MOST_COLUMNS, both)
        *first, last = names
        order = torch.arange(both).view(-1, 2).T.flatten() if interleaved else None

        def stack(number: int, name: str, columns: int, depth: int, rows: Tensor | None = None) -> Matrix:
            shape = (num_experts, *((depth, columns) if transpose else (columns, depth)))
            part = Weight(prefix_of_all + name, shape, number, transpose=transpose, rows=rows)
            biases = Weight(f"{part.name}_bias", (num_experts, columns), number, rows=rows)
            return Matrix((part,), (biases,) if bias else ())

        prefix_of_all, ups, downs = self.prefix + prefix, [], []
        for number in range(num_experts):
            if stacked:
                ups.append(stack(number, first[0], both, hidden, order))
                downs.append(stack(number, last, hidden, size))
            else:
                own = f"{prefix}{number}."
                ups.append(self.matrix([own + name for name in first], [both // len(first)] * len(first), hidden))
                downs.append(self.matrix(own + last, hidden, size))
        add, top_k = target == RESIDUAL, self.model.top_k
        matrices = tuple(ups), tuple(downs)
        self.model.add(Experts(source, target, *matrices, activation, top_k, add, factor, weigh_input))

    def route(self, source: str, num_experts: int, name: str = "mlp.gate", *, bias: bool = False, **how: Any) -> None:
        """The router. how: the other fields of `Route`"""
        matrix = self.matrix(name, num_experts, self.model.hidden_size, bias=bias)
        self.model.add(Route(source, matrix, **how))

    def fused_qkv(self, sizes: HeadSizes, name: str, *, bias: bool, order: Tensor | None = None) -> Matrix:
        """One linear for queries, keys and values, as three parts. order: of its rows, if they lie otherwise"""
        counts = sizes.columns
        rows = torch.arange(sum(counts)) if order is None else order
        weight = self.weight(f"{name}.weight", len(rows), self.model.hidden_size)
        biases = self.weight(f"{name}.bias", len(rows))
        parts = [replace(weight, rows=part) for part in torch.split(rows, list(counts))]
        return Matrix(tuple(parts), tuple(replace(biases, rows=part.rows) for part in parts) if bias else ())

    def mla(
        self,
        source: str,
        *,
        scale: float,
        rotary: int,
        is_interleaved: bool,
        bias: bool = False,
        factor: float = 1.0,
    ) -> None:
        """Multi-head latent attention (DeepSeek V2): keys and values of all heads are computed from a latent of a few
        numbers, and stored."""
        config, model = self.model.config, self.model
        heads, hidden = int(config["num_attention_heads"]), model.hidden_size
        latent, rank = int(config["kv_lora_rank"]), config.get("q_lora_rank")
        plain, rotated = int(config["qk_nope_head_dim"]), int(config["qk_rope_head_dim"])
        value_dim = int(config.get("v_head_dim") or hidden // heads)
        config.ignore("head_dim", "num_key_value_heads", "qk_head_dim")
        width, norm, prefix = plain + rotated, NormKind(1e-6), "self_attn."
        # Rotated numbers come first in a head here, and last in the files.
        within = torch.cat([torch.arange(plain, width), torch.arange(plain)])
        if is_interleaved:
            within = within[deinterleaved(1, width, rotated)]
        rows = (torch.arange(heads)[:, None] * width + within).flatten()
        queries = (prefix + "q_proj", hidden) if rank is None else (prefix + "q_b_proj", int(rank))
        if rank is not None:
            first = self.matrix(prefix + "q_a_proj", int(rank), hidden, bias=bias)
            model.add(Linear(source, "query_latent", first))
            self.norm(norm, prefix + "q_a_layernorm", source="query_latent", target="query_input", size=int(rank))
        weight = replace(self.weight(queries[0] + ".weight", heads * width, queries[1]), rows=rows)
        model.add(Linear(source if rank is None else "query_input", "queries", Matrix((weight,))))
        down = self.matrix(prefix + "kv_a_proj_with_mqa", latent + rotated, hidden, bias=bias)
        if is_interleaved:
            order = torch.cat([torch.arange(latent), latent + deinterleaved(1, rotated, rotated)])
            down = rows_of(down, order)
        model.add(Linear(source, "latent", down))
        self.norm(norm, prefix + "kv_a_layernorm", source="latent", target="latent_input", size=latent)
        each = plain + value_dim
        up = self.matrix(prefix + "kv_b_proj", heads * each, latent, bias=False)
        model.add(Linear("latent_input", "keys_values", up))
        model.add(
            Gather(("queries", "latent", "keys_values"), "qkv", _mla_columns(heads, plain, rotated, value_dim, latent))
        )
        sizes = HeadSizes(heads, heads, width, value_dim, rotated)
        out = self.out(sizes, prefix + "o_proj", bias=bias)
        self.attention("qkv", sizes, out=out, rotary=rotary, scale=scale, factor=factor, is_ready=True)


def _mla_columns(heads: int, plain: int, rotated: int, value_dim: int, latent: int) -> Tensor:
    """Where queries, keys and values come from: columns of queries, latent, and keys with values, side by side."""
    width, each, head = plain + rotated, plain + value_dim, torch.arange(heads)[:, None]
    shared = (heads * width + latent + torch.arange(rotated)).expand(heads, -1)
    start = heads * width + latent + rotated + head * each
    keys = torch.cat([shared, start + torch.arange(plain)], dim=1)
    values = start + plain + torch.arange(value_dim)
    return torch.cat([torch.arange(heads * width), keys.flatten(), values.flatten()])


def _reordered(qkv: Matrix, sizes: HeadSizes) -> Matrix:
    """The linears of queries and keys, which come first, with the rows of each head in the order of halves."""
    orders = [deinterleaved(heads, sizes.head_dim, sizes.rotary_dim) for heads in (sizes.heads, sizes.kv_heads)]

    def reorder(parts: tuple[Weight, ...]) -> tuple[Weight, ...]:
        return tuple(replace(part, rows=order) for part, order in zip(parts, [*orders, None], strict=bool(parts)))

    return Matrix(reorder(qkv.parts), reorder(qkv.biases))
