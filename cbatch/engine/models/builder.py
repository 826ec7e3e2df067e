"""What declarations are written with: each call adds operations to the program of a model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from cbatch.engine.models.config_reader import ConfigReader, UnsupportedConfig
from cbatch.engine.models.program import (
    RESIDUAL,
    Activation,
    Attend,
    Embed,
    Experts,
    Gate,
    Gather,
    Head,
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
from cbatch.engine.models.rotary import read_rotary
from cbatch.engine.runtime.kv_cache import LayerShape

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "relu2": "relu2", "sigmoid": "sigmoid",
}  # fmt: skip
"""Names in config files, and what they are called here."""


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

    def __call__(self, name: str, *shape: int) -> Norm:
        """With the weights `name`.weight and `name`.bias."""
        weight = Weight(f"{name}.weight", shape, offset=self.offset) if self.has_weight else None
        return Norm(self.kind, self.eps, weight, Weight(f"{name}.bias", shape) if self.has_bias else None)


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

    @property
    def cache(self) -> LayerShape:
        return LayerShape(self.kv_heads, self.head_dim, self.value_dim or self.head_dim)

    @property
    def columns(self) -> tuple[int, int, int]:
        """Of queries, keys and values."""
        cache = self.cache
        return self.heads * self.head_dim, self.kv_heads * self.head_dim, self.kv_heads * cache.value_dim

    def halves_first(self, heads: int) -> Tensor | None:
        """The order of rows with which halves are rotated instead of neighbours; None if that is so already."""
        return deinterleaved(heads, self.head_dim, self.rotary_dim) if self.is_interleaved else None


def deinterleaved(heads: int, head_dim: int, rotary_dim: int, start: int = 0) -> Tensor:
    """Indices of `heads * head_dim` numbers: of each head's rotated ones from `start`, the even ones come first."""
    order = torch.arange(head_dim)
    order[start : start + rotary_dim] = start + torch.arange(rotary_dim).view(-1, 2).T.flatten()
    return (torch.arange(heads)[:, None] * head_dim + order).flatten()


class Builder:
    """Collects the operations of one model.

    Raises UnsupportedConfig for sizes that no model can have.
    """

    def __init__(self, config: ConfigReader) -> None:
        self.config = config
        self.hidden_size = int(config.first("hidden_size", "n_embd"))
        self.vocab_size = int(config["vocab_size"])
        self.num_layers = int(config.first("num_hidden_layers", "n_layer"))
        self.max_model_len = int(config.first("max_position_embeddings", "n_positions"))
        self.is_tied = False
        self.prefixes: tuple[str, ...] = ()
        self.spare: list[str] = [r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)"]
        self._operations: list[Operation] = []
        self._caches: list[LayerShape] = []
        self._windows: list[int | None] = []
        self._rotaries: list[Rotary] = []
        config.expect("quantization_config", None)

    def add(self, operation: Operation) -> None:
        self._operations.append(operation)

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
            is_tied=self.is_tied,
            prefixes=self.prefixes,
            spare=tuple(self.spare),
        )

    def head_sizes(self, *, kv_heads: int | None = None, part: float = 1.0, is_interleaved: bool = False) -> HeadSizes:
        """As most configurations give them. part: of each head that is rotated, if the file does not say"""
        config = self.config
        heads = int(config.first("num_attention_heads", "n_head"))
        head_dim = int(config.get("head_dim") or self.hidden_size // heads)
        kv_heads = kv_heads or int(config.get("num_key_value_heads") or heads)
        if heads % kv_heads or min(heads, kv_heads, head_dim) < 1:
            raise UnsupportedConfig(f"its {heads} query heads cannot share {kv_heads} KV heads")
        return HeadSizes(heads, kv_heads, head_dim, head_dim, head_dim, is_interleaved)

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

    def layer_types(self, default: Sequence[str]) -> list[str]:
        kinds = list(self.config.get("layer_types") or default)
        if not set(kinds) <= {"full_attention", "sliding_attention"} or len(kinds) != self.num_layers:
            raise UnsupportedConfig("it has layers of other types")
        return kinds

    def embed(self, name: str = "model.embed_tokens", scale: float = 1.0) -> None:
        self._embedding = Weight(f"{name}.weight", (self.vocab_size, self.hidden_size))
        self.add(Embed(self._embedding, scale))

    def embed_positions(self, name: str, positions: str, offset: int = 0) -> None:
        """Tokens and learned positions."""
        self._embedding = Weight(f"{name}.weight", (self.vocab_size, self.hidden_size))
        table = Weight(f"{positions}.weight", (self.max_model_len + offset, self.hidden_size))
        self.add(Embed(self._embedding, positions=table, position_offset=offset))

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
        self.add(Head(norm, matrix, factor, softcap or 0.0))

    def new_cache(self, shape: LayerShape, window: int) -> int:
        self._caches.append(shape)
        self._windows.append(window or None)
        return len(self._caches) - 1


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

    def matrix(self, names: str | Sequence[str], columns: int | Sequence[int], depth: int, *, bias: bool) -> Matrix:
        """The matrix of linears side by side, by their names."""
        names, columns = ([names], [columns]) if isinstance(names, str) else (names, columns)
        sizes = [columns] if isinstance(columns, int) else columns
        parts = tuple(self.weight(f"{name}.weight", size, depth) for name, size in zip(names, sizes, strict=True))
        biases = tuple(self.weight(f"{name}.bias", size) for name, size in zip(names, sizes, strict=True))
        return Matrix(parts, biases if bias else ())

    def norm(
        self, kind: NormKind, name: str, *, source: str = RESIDUAL, target: str = "normed", size: int | None = None
    ) -> str:
        """Norms a buffer; returns the name of the result."""
        size = size or self.model.hidden_size
        self.model.add(Normalize(source, target, kind(self.prefix + name, size), width=size))
        return target

    def add_to_residual(
        self, source: str, matrix: Matrix, *, factor: float = 1.0, post_norm: Norm | None = None
    ) -> None:
        """residual += factor * post_norm(source times matrix)."""
        if post_norm is None:
            self.model.add(Linear(source, RESIDUAL, matrix, add=True, factor=factor))
        else:
            self.model.add(Linear(source, "added", matrix))
            self.model.add(Normalize("added", RESIDUAL, post_norm, add=True, factor=factor))

    def attention(
        self,
        source: str,
        sizes: HeadSizes,
        *,
        qkv: Matrix,
        out: Matrix,
        rotary: int | None = None,
        scale: float | None = None,
        window: int = 0,
        chunk: int = 0,
        softcap: float | None = None,
        sinks: Weight | None = None,
        factor: float = 1.0,
        post_norm: Norm | None = None,
        gate: Gate | None = None,
        **norms: Any,
    ) -> None:
        """Self-attention, whose result is added to the residual.

        qkv:   queries, keys and values side by side
        gate:  of what attention gives
        norms: query_norm, key_norm, value_norm, norm_rows, norm_last and clip of `PrepareHeads`
        """
        model, shape = self.model, sizes.cache
        if sizes.is_interleaved:
            qkv = _reordered(qkv, sizes)
        model.add(Linear(source, "qkv", qkv))
        cache = model.new_cache(shape, window)
        model.add(PrepareHeads("qkv", "query", sizes.heads, shape, cache, rotary, **norms))
        scale = sizes.head_dim**-0.5 if scale is None else scale
        model.add(
            Attend("query", "attended", cache, sizes.heads, shape, scale, window, chunk, softcap or 0.0, sinks)
        )
        if gate is not None:
            model.add(gate)
        self.add_to_residual("attended", out, factor=factor, post_norm=post_norm)

    def qkv(self, sizes: HeadSizes, prefix: str = "self_attn.", *, bias: bool = False) -> Matrix:
        """The linears q_proj, k_proj and v_proj."""
        names = [f"{prefix}{part}_proj" for part in "qkv"]
        return self.matrix(names, sizes.columns, self.model.hidden_size, bias=bias)

    def out(self, sizes: HeadSizes, name: str = "self_attn.o_proj", *, bias: bool = False) -> Matrix:
        depth = sizes.heads * sizes.cache.value_dim
        return self.matrix(name, self.model.hidden_size, depth, bias=bias)

    def head_norm(self, kind: NormKind, name: str, heads: int, head_dim: int) -> Norm:
        """A norm of each head by itself, with the same weights for all."""
        norm = kind(self.prefix + name, head_dim)
        rows = torch.arange(head_dim).repeat(heads)
        return replace(
            norm,
            weight=None if norm.weight is None else replace(norm.weight, rows=rows),
            bias=None if norm.bias is None else replace(norm.bias, rows=rows),
        )

    def feed_forward(
        self,
        source: str,
        size: int,
        activation: Activation,
        *,
        prefix: str = "mlp.",
        names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"),
        bias: bool = False,
        factor: float = 1.0,
        post_norm: Norm | None = None,
    ) -> None:
        """The feed-forward part, whose result is added to the residual.

        names: of the linears up to the activation, side by side, and of the one after it
        """
        *first, last = (prefix + name for name in names)
        columns = [(1 + activation.gated) * size // len(first)] * len(first)
        up = self.matrix(first, columns, self.model.hidden_size, bias=bias)
        self.model.add(Linear(source, "intermediate", up, activation=activation))
        down = self.matrix(last, self.model.hidden_size, size, bias=bias)
        self.add_to_residual("intermediate", down, factor=factor, post_norm=post_norm)


def _reordered(qkv: Matrix, sizes: HeadSizes) -> Matrix:
    """The linears of queries and keys, which come first, with the rows of each head in the order of halves."""
    orders = [sizes.halves_first(sizes.heads), sizes.halves_first(sizes.kv_heads)]

    def reorder(parts: tuple[Weight, ...]) -> tuple[Weight, ...]:
        first = [replace(part, rows=order) for part, order in zip(parts[:2], orders, strict=True)]
        return (*first, *parts[2:]) if parts else ()

    return Matrix(reorder(qkv.parts), reorder(qkv.biases))
