"""The builder of declarations: each call adds operations to the program of a model."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor

from cbatch.model.config import ConfigReader, UnsupportedConfig
from cbatch.model.families.rotary import read_rotary
from cbatch.model.ops.all import (
    RESIDUAL,
    Activation,
    Embed,
    Experts,
    Head,
    Linear,
    Matrix,
    Norm,
    Normalize,
    Operation,
    Program,
    Rotary,
    Route,
    Weight,
)
from cbatch.model.tensor_names import is_classifier
from cbatch.runtime.kv_cache import LayerShape
from cbatch.runtime.state_pool import StateShape

ACTIVATIONS = {
    "silu": "silu", "swish": "silu", "gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh", "relu": "relu", "relu2": "relu2", "sigmoid": "sigmoid",
}  # fmt: skip
"""Names in config files, and what they are called here."""

_ACTIVATION_KEYS = "hidden_act", "hidden_activation", "activation_function", "activation", "mlp_hidden_act"

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
        raise UnsupportedConfig(f"one of its sizes is {max(sizes)}, and {most} is the most")


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

    norm, sizes, rotary, activation: those of its layers, unless a part says otherwise; `read` sets them
    num_experts: of all layers that it has so far
    is_causal: whether tokens see earlier ones only
    other_norms: those that are of another kind, by the last part of their names
    extra_tokens: rows of the embedding beyond the vocabulary
    Raises UnsupportedConfig for sizes that no model can have.
    """

    norm: NormKind
    sizes: HeadSizes
    activation: Activation
    rotary: int | None = None

    def __init__(self, config: ConfigReader) -> None:
        self.config, self.kind = config, config.kind
        self.hidden_size = config.whole("hidden_size")
        self.vocab_size = int(config["vocab_size"])
        kinds = config.get("layers_block_type")  # which some files have instead of a number
        self.num_layers = len(kinds) if kinds else config.whole("num_hidden_layers")
        config.ignore("num_hidden_layers")
        _check_sizes(_MOST_COLUMNS, self.hidden_size)
        _check_sizes(_MOST_TOKENS, self.vocab_size)
        _check_sizes(_MOST_LAYERS, self.num_layers)
        self.numbers: Sequence[int] = range(self.num_layers)
        self.max_model_len = int(config.get("max_position_embeddings") or 0)
        self.is_causal = True
        self.is_tied, self.num_experts, self.extra_tokens, self.image_scale = False, 0, 0, 1.0
        self.other_norms: dict[str, NormKind] = {}
        self.replaced_ids: dict[int, int] = {}
        self.notes: list[str] = []
        self.root, self.renamed = "", tuple[tuple[str, str], ...]()
        # Of all families: frequencies, and layers that predict more than the next token.
        self.spare = [r"(.*\.)?rotary_emb\.(inv_freq|cos_cached|sin_cached)", r"(.*\.)?mtp[._].*"]
        self._operations: list[Operation] = []
        self._caches: list[LayerShape] = []
        self._windows: list[int | None] = []
        self._rotaries: list[Rotary] = []
        self._states: list[StateShape] = []
        config.expect("quantization_config", None)

    def read(
        self, *, norm: NormKind | None = None, has_rotary: bool = True, activation: Activation | None = None,
        gated: bool = True, kv_heads: int | None = None, is_interleaved: bool = False, **rope: Any,
    ) -> None:  # fmt: skip
        """Reads the norm, the heads, their rotary setting and the activation.

        norm: of RMS by default
        activation, kv_heads: instead of what the config says
        rope: see `read_rotary`
        """
        config = self.config
        self.norm = norm or NormKind(config["rms_norm_eps"])
        heads = config.whole("num_attention_heads")
        head_dim = int(config.get("head_dim") or self.hidden_size // heads)
        kv_heads = kv_heads or int(config.get("num_key_value_heads") or heads)
        if heads % kv_heads or min(heads, kv_heads, head_dim) < 1:
            raise UnsupportedConfig(f"its {heads} query heads cannot share {kv_heads} KV heads")
        self.sizes = HeadSizes(heads, kv_heads, head_dim, head_dim, head_dim, is_interleaved)
        if has_rotary:
            self.rotary = self.read_rotary(**rope)
        self.activation = activation or self.read_activation(gated=gated)

    def read_activation(self, *, gated: bool = True) -> Activation:
        """By the key that the class has for it. Those that have none use SiLU."""
        config = self.config
        key = next((one for one in _ACTIVATION_KEYS if config.default(one)), None)
        name = "silu" if key is None else config.get(key) or config.default(key)
        if name not in ACTIVATIONS:
            raise UnsupportedConfig(f"its activation is {name}")
        return Activation(ACTIVATIONS[name], gated)

    def read_rotary(self, **options: Any) -> int:
        """The number of the rotary setting that the config has for its heads; see `read_rotary`."""
        return self.add_rotary(read_rotary(self.config, self.sizes.head_dim, **options))

    def read_rotaries(self, windows: Sequence[int], base: float) -> list[int]:
        """The rotary setting of each layer: files scale that of full attention only, unless they name both types.

        base: of layers with windows, if the file does not say it
        """
        given = self.config.get("rope_parameters") or {}
        if given and "full_attention" not in given:
            raise UnsupportedConfig("its rope_parameters do not name types of layers")
        local = {"rope_theta": base} | (given.get("sliding_attention") or {})
        return [
            self.read_rotary(settings=local) if window else self.read_rotary(layer_type="full_attention")
            for window in windows
        ]

    def add_rotary(self, rotary: Rotary) -> int:
        """The number of a rotary setting, which is added if it is new."""
        if rotary not in self._rotaries:
            self._rotaries.append(rotary)
        return self._rotaries.index(rotary)

    def windows(self, default_kinds: Sequence[str] | None = None) -> list[int]:
        """The window of each layer by `layer_types`, 0 for none."""
        kinds = self.layer_types(default_kinds or ["full_attention"] * self.num_layers)
        if "sliding_attention" not in kinds:
            self.config.ignore("sliding_window")
            return [0] * self.num_layers
        size = self.config.whole("sliding_window")
        return [size if kind == "sliding_attention" else 0 for kind in kinds]

    def layer_types(
        self, default: Sequence[str], known: Sequence[str] = ("full_attention", "sliding_attention")
    ) -> list[str]:
        kinds = list(self.config.get("layer_types") or default)
        if not set(kinds) <= set(known) or len(kinds) != self.num_layers:
            raise UnsupportedConfig("it has layers of other types")
        return kinds

    def sparse_by_type(self, default: Sequence[bool]) -> list[bool]:
        """Which layers have experts, by `mlp_layer_types`."""
        kinds = self.config.get("mlp_layer_types")
        return [kind == "sparse" for kind in kinds] if kinds else list(default)

    def add(self, operation: Operation) -> None:
        self._operations.append(operation)

    def embed(self, name: str = "model.embed_tokens", scale: float = 1.0, positions: str = "", offset: int = 0) -> None:
        """Tokens, times `scale`, and maybe learned positions, which begin in row `offset` of their table."""
        self._embedding = Weight(f"{name}.weight", (self.vocab_size + self.extra_tokens, self.hidden_size))
        learned = Weight(f"{positions}.weight", (self.max_model_len + offset, self.hidden_size)) if positions else None
        self.add(Embed(self._embedding, scale, learned, offset, image_scale=self.image_scale))

    def head(
        self, norm: str, name: str = "lm_head", *, bias: bool = False, factor: float = 1.0,
        softcap: float | None = None,
    ) -> None:  # fmt: skip
        """The output head after the last norm, which is the embedding if `tie_word_embeddings` says so."""
        self.is_tied = self.config.flag("tie_word_embeddings")
        weight = Weight(f"{name}.weight", (self.vocab_size, self.hidden_size))
        biases = (Weight(f"{name}.bias", (self.vocab_size,)),) if bias else ()
        self._head = Matrix((self._embedding if self.is_tied else weight,), biases)
        kind = self.other_norms.get(norm.rpartition(".")[2], self.norm)
        self.add(Head(kind(norm, self.hidden_size), self._head, factor, softcap or 0.0))

    def new_cache(self, shape: LayerShape, window: int) -> int:
        self._caches.append(shape)
        self._windows.append(window or None)
        return len(self._caches) - 1

    def new_state(self, *shape: int) -> int:
        """The number of a state of a recurrent layer."""
        self._states.append(StateShape(shape, torch.float32))
        return len(self._states) - 1

    def program(self) -> Program:
        architectures = self.config.get("architectures") or [self.kind]
        if is_classifier(architectures):
            self.spare.append(r"(.*\.)?score\.(weight|bias)")  # see `read_classifier`
        if min(self.num_layers, self.hidden_size, self.vocab_size, self.max_model_len) < 1:
            raise UnsupportedConfig("one of its sizes is not positive")
        return Program(
            name=str(architectures[0]), kind=self.kind, hidden_size=self.hidden_size, vocab_size=self.vocab_size,
            max_model_len=self.max_model_len, operations=tuple(self._operations), caches=tuple(self._caches),
            windows=tuple(self._windows), rotaries=tuple(self._rotaries), embedding=self._embedding, head=self._head,
            is_tied=self.is_tied, replaced_ids=self.replaced_ids, notes=tuple(self.notes), root=self.root,
            renamed=self.renamed, is_wrapped=self.config.is_wrapped, spare=tuple(self.spare),
            states=tuple(self._states), is_causal=self.is_causal,
        )  # fmt: skip


@dataclass(frozen=True)
class Layer:
    """One layer of a model, whose operations are added to those of the model.

    prefix: of the names of its weights
    """

    model: Builder
    number: int
    prefix: str

    def weight(self, name: str, *shape: int) -> Weight:
        return Weight(self.prefix + name, shape)

    def matrix(
        self, names: str | Sequence[str], columns: int | Sequence[int], depth: int, *, bias: bool = False,
        transpose: bool = False,
    ) -> Matrix:  # fmt: skip
        """The matrix of linears side by side, by their names. transpose: they are stored as [depth, columns]"""
        names = [names] if isinstance(names, str) else names
        sizes = [columns] if isinstance(columns, int) else columns
        pairs = list(zip(names, sizes, strict=True))
        parts = [
            Weight(f"{self.prefix}{name}.weight", (depth, size) if transpose else (size, depth), transpose=transpose)
            for name, size in pairs
        ]
        return Matrix(tuple(parts), tuple(self.weight(f"{name}.bias", size) for name, size in pairs) if bias else ())

    def norm_of(self, name: str, size: int | None = None, kind: NormKind | None = None) -> Norm:
        """A norm of the model's kind, of as many numbers as the residual has by default."""
        kind = kind or self.model.other_norms.get(name, self.model.norm)
        return kind(self.prefix + name, size or self.model.hidden_size)

    def norm(self, name: str, *, target: str = "normed") -> str:
        """Norms the residual; returns the name of the result. An empty name: it is copied as it is."""
        norm = self.norm_of(name) if name else Norm("none", 0.0)
        self.model.add(Normalize(RESIDUAL, target, norm, width=self.model.hidden_size if name else 0))
        return target

    def add_to_residual(self, source: str, matrix: Matrix, *, factor: float = 1.0, after: str = "") -> None:
        """residual += factor * norm(source times matrix). after: the name of the norm; empty for none"""
        if not after:
            self.model.add(Linear(source, RESIDUAL, matrix, add=True, factor=factor))
        else:
            self.model.add(Linear(source, "added", matrix))
            self.add_normed(after, factor=factor)

    def add_normed(self, name: str, *, factor: float = 1.0) -> None:
        """residual += factor * norm(the buffer `added`)."""
        self.model.add(Normalize("added", RESIDUAL, self.norm_of(name), add=True, factor=factor))

    def route(
        self, source: str, num_experts: int, name: str = "mlp.gate", *, top_k: int | None = None, bias: bool = False,
        transpose: bool = False, choice_bias: str = "", choice_shape: tuple[int, ...] = (), **how: Any,
    ) -> int:  # fmt: skip
        """The router. Returns how many experts a token has, `num_experts_per_tok` by default.

        choice_bias, choice_shape: the name of its weights, and their dimensions before that of the experts, of which
            the first is an index of 0
        how: the other fields of `Route`
        """
        matrix = self.matrix(name, num_experts, self.model.hidden_size, bias=bias, transpose=transpose)
        top_k = self.model.config.whole("num_experts_per_tok") if top_k is None else top_k
        chosen = self.weight(choice_bias, *choice_shape, num_experts) if choice_bias else None
        if chosen is not None and choice_shape:
            chosen = replace(chosen, index=0)
        self.model.add(Route(source, matrix, top_k, choice_bias=chosen, **how))
        return top_k

    def experts(
        self, source: str, num_experts: int, top_k: int, size: int, *, prefix: str = "mlp.experts.",
        names: tuple[str, ...] = ("gate_proj", "up_proj", "down_proj"), activation: Activation | None = None,
        stacked: bool = False, transpose: bool = False, bias: bool = False, interleaved: bool = False,
        target: str = RESIDUAL, factor: float = 1.0, weigh_input: bool = False, width: int | None = None,
    ) -> None:  # fmt: skip
        """The experts of a layer, which are added to the residual.

        width:   of what they read and give, that of the residual by default
        stacked: the files hold the matrices of all experts in one tensor, and those of each by itself otherwise
        transpose, bias, interleaved: of stacked ones: they are [depth, columns]; the names with `_bias` are theirs;
                 columns of gate and up take turns
        """
        activation = activation or self.model.activation
        hidden, both = width or self.model.hidden_size, (1 + activation.gated) * size
        _check_sizes(_MOST_EXPERTS, num_experts)
        self.model.num_experts += num_experts
        _check_sizes(_MOST_EXPERTS_IN_ALL, self.model.num_experts)
        _check_sizes(_MOST_COLUMNS, both)
        *first, last = names
        order = torch.arange(both).view(-1, 2).T.flatten() if interleaved else None

        def matrix(number: int, names: list[str], columns: int, depth: int, rows: Tensor | None = None) -> Matrix:
            if not stacked:
                own = [f"{prefix}{number}.{name}" for name in names]
                return self.matrix(own, [columns // len(names)] * len(names), depth)
            width, names = columns // len(names), [self.prefix + prefix + name for name in names]
            shape = (num_experts, *((depth, width) if transpose else (width, depth)))
            parts = (Weight(name, shape, number, transpose=transpose, rows=rows) for name in names)
            biases = (Weight(f"{name}_bias", (num_experts, width), number, rows=rows) for name in names if bias)
            return Matrix(tuple(parts), tuple(biases))

        ups = tuple(matrix(number, first, both, hidden, order) for number in range(num_experts))
        downs = tuple(matrix(number, [last], hidden, size) for number in range(num_experts))
        add = target == RESIDUAL
        self.model.add(Experts(source, target, ups, downs, activation, top_k, add, factor, weigh_input))
