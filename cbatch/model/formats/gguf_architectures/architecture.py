"""Architectures of GGUF files: their settings as a `config.json` has them, and the fate of their tensors.

Declarations (see `declared`) are made of `Rule`s by the names of tensors in a layer, and of what an architecture has
beside the common settings.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from cbatch.base.model_files import InvalidFile
from cbatch.model.families.builder import deinterleaved
from cbatch.model.formats.gguf_blocks import values_of
from cbatch.model.formats.gguf_file import GgufFile

_LARGEST = 2**31 - 1


def _is_whole(value: Any) -> bool:
    return type(value) is int and 0 <= value <= _LARGEST


class Metadata:
    """The metadata of a file, with the type that each entry must have. Raises InvalidFile for another one."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self._prefix = file.architecture + "."

    def _get(self, name: str, default: Any = None) -> Any:
        found = self.file.metadata.get(self._prefix + name)
        return default if found is None else found

    def _checked(self, name: str, value: Any, is_right: bool) -> Any:
        if not is_right:
            found = "lacks" if value is None else f"has {str(value)[:60]!r} as"
            raise InvalidFile(f"{self.file.paths[0]} {found} {self._prefix}{name}.")
        return value

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number; if layers have one each, that of all."""
        value = self._get(name, default)
        value = value[0] if isinstance(value, list) and len(set(value)) == 1 else value
        return int(self._checked(name, value, _is_whole(value)))

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name, default)
        return float(self._checked(name, value, type(value) in (int, float) and math.isfinite(value)))

    def text(self, name: str, default: str) -> str:
        value = self._get(name, default)
        return str(self._checked(name, value, isinstance(value, str)))

    def flag(self, name: str, default: bool) -> bool:
        value = self._get(name, default)
        return bool(self._checked(name, value, isinstance(value, bool)))

    def wholes(self, name: str, count: int) -> list[int]:
        """A number for each layer."""
        value = self._get(name)
        values = [value] * count if type(value) is int else value
        is_list = isinstance(values, list) and len(values) >= count and all(map(_is_whole, values))
        self._checked(name, value, is_list)
        return list(values[:count])

    def flags(self, name: str, count: int) -> list[bool] | None:
        """A flag for each layer; None if there is none, or a number that says how often one is set."""
        value = self._get(name)
        if not isinstance(value, list):
            return None
        self._checked(name, value, len(value) >= count and all(type(one) is bool for one in value))
        return value[:count]

    def has(self, name: str) -> bool:
        return self._get(name) is not None

    def has_tensor(self, name: str) -> bool:
        return name in self.file.tensors

    def shapes(self, ending: str) -> list[tuple[int, ...]]:
        """Of such a tensor, in all layers that have one."""
        return [tensor.shape for name, tensor in self.file.tensors.items() if name.endswith("." + ending)]

    @property
    def num_layers(self) -> int:
        """Without those behind the model, which predict several tokens at once."""
        return self.whole("block_count") - self.whole("nextn_predict_layers", 0)

    def refused(self, why: str) -> InvalidFile:
        return InvalidFile(f"{self.file.paths[0]} {why}.")

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Of a tensor that must be there."""
        if tensor not in self.file.tensors:
            raise self.refused(f"has no tensor {tensor!r}")
        return self.file.tensors[tensor].shape

    def factors(self, tensor: str, count: int) -> list[float] | None:
        """Numbers of a small tensor that changes frequencies; None if it is not there."""
        if tensor not in self.file.tensors:
            return None
        found = self.file.tensors[tensor]
        if found.shape != (count,):
            raise self.refused(f"is damaged: the tensor {tensor!r} has the shape {found.shape}")
        values = [float(value) for value in values_of(found.type, found.data)[0].tolist()]
        if not all(math.isfinite(value) and value > 0 for value in values):
            raise self.refused(f"is damaged: {tensor!r} has numbers that cannot be factors")
        return values


Config = dict[str, Any]
Order = Callable[[Config, int], Tensor | None]
"""The order of some rows or columns in the file, given their number; None if they cannot be those of the model."""

Shape = tuple[int, ...]

MAX_EXPERTS = 4096


@dataclass(frozen=True, slots=True)
class Rule:
    """The weight that a tensor of a layer becomes.

    name:      of the weight in its layer. The ending of the tensor follows, unless the rule is for a whole name; `{}`
               stands for the number of an expert, or of a head
    parts:     tensors whose rows follow those of this one
    rows, columns: their order in the file, see `GgufMatrix`
    shape:     of the weight, given that of the tensors
    is_transposed, combine: see `GgufMatrix`
    """

    name: str
    parts: tuple[str, ...] = ()
    rows: Order | None = None
    columns: Order | None = None
    shape: Callable[[Shape], Shape] | None = None
    is_transposed: bool = False
    combine: Callable[[Config, Sequence[Tensor]], Tensor] | None = None


Rules = dict[str, str | Rule]
"""By names of tensors in a layer, whole (`ssm_dt.bias`) or without their ending (`attn_q`); or of the model."""

BEHIND = Rule("")
"""Of tensors whose rows follow those of another one."""

MODEL: Rules = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
LAYER: Rules = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


Read = Callable[[Metadata, Config], Any]
"""Reads a setting of a file's model, given the common ones."""

ABSENT = object()
"""The value of a common setting that an architecture does not have."""


@dataclass(frozen=True, slots=True)
class Architecture:
    """How models of an architecture are described.

    kind, name:   their `model_type` and their class in transformers
    settings:     what they have beside the common settings, each a value, or a function that reads it
    more:         functions that read several settings
    layer, model: what becomes of their tensors
    norm_offset:  what the file adds to weights of norms, but for those that `plain_norms` names
    when:         of several for one name, the first that fits is taken
    """

    kind: str
    name: str
    settings: Mapping[str, Any]
    more: Sequence[Read]
    layer: Rules
    model: Rules
    norm_offset: float
    plain_norms: tuple[str, ...]
    when: Callable[[Metadata], bool]

    def read(self, data: Metadata, config: Config) -> Config:
        """All settings, given the common ones."""
        found = dict(config)
        for read in self.more:
            found |= read(data, found)
        found |= {name: one(data, config) if callable(one) else one for name, one in self.settings.items()}
        return {name: one for name, one in found.items() if one is not ABSENT}


architectures: dict[str, list[Architecture]] = {}
"""By their names in files."""


def declare(
    name: str,
    kind: str,
    class_name: str,
    *,
    more: Sequence[Read] = (),
    layer: Rules = LAYER,
    model: Rules = MODEL,
    norm_offset: float = 0.0,
    plain_norms: tuple[str, ...] = (),
    when: Callable[[Metadata], bool] = lambda data: True,
    **settings: Any,
) -> None:
    """Registers a declaration for the `general.architecture` name; see `Architecture`."""
    settings = {"rope_parameters": read_rope, "hidden_act": "silu"} | settings
    made = Architecture(kind, class_name, settings, more, layer, model, norm_offset, plain_norms, when)
    architectures.setdefault(name, []).append(made)


def number(name: str, default: float) -> Read:
    return lambda data, config: data.number(name, default)


def whole(name: str, default: int) -> Read:
    return lambda data, config: data.whole(name, default)


def flag(name: str, default: bool) -> Read:
    return lambda data, config: data.flag(name, default)


def has(tensor: str) -> Read:
    """Whether the first layer has a tensor."""
    return lambda data, config: data.has_tensor(f"blk.0.{tensor}")


def has_any(tensor: str) -> Read:
    """Whether a layer has a tensor."""
    return lambda data, config: bool(data.shapes(tensor))


def permuted(name: str, heads: str) -> Rule:
    """Queries or keys whose neighbours are rotated together, as llama.cpp has those of Llama and its kin."""

    def order(config: Config, rows: int) -> Tensor | None:
        count, head_dim = config[heads], config["head_dim"]
        if rows != count * head_dim or head_dim % 2:
            return None
        return deinterleaved(count, head_dim, head_dim)

    return Rule(name, rows=order)


PERMUTED: Rules = {
    "attn_q": permuted("self_attn.q_proj", "num_attention_heads"),
    "attn_k": permuted("self_attn.k_proj", "num_key_value_heads"),
}


def flat(shape: Shape) -> Shape:
    """That of a vector, whatever the file makes of it."""
    return (math.prod(shape),)


def with_channel(shape: Shape) -> Shape:
    """That of a convolution's weight: transformers has a dimension of one channel between the others."""
    return (shape[0], 1, shape[1]) if len(shape) == 2 else shape


def decay_log(config: Config, parts: Sequence[Tensor]) -> Tensor:
    """Of how fast a state fades: the file has -exp of it."""
    return torch.log(-parts[0].float()).flatten()


def experts(
    prefix: str = "mlp.experts.{}.", gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj"
) -> Rules:
    """The matrices of all experts, which transformers has one by one."""
    return {"ffn_gate_exps": prefix + gate, "ffn_up_exps": prefix + up, "ffn_down_exps": prefix + down}


def shared_experts(prefix: str) -> Rules:
    return {f"ffn_{part}_shexp": f"{prefix}{part}_proj" for part in ("gate", "up", "down")}


def read_experts(data: Metadata) -> tuple[int, int]:
    """How many experts there are, and how many a token has."""
    count, top_k = data.whole("expert_count"), data.whole("expert_used_count")
    shapes = data.shapes("ffn_down_exps.weight")
    if any(len(shape) != 3 or shape[0] != count for shape in shapes) or not shapes:
        raise data.refused(f"claims to have {count} experts, and its tensors differ")
    if not 1 <= top_k <= count <= MAX_EXPERTS:
        raise data.refused(f"claims to have {count} experts, of which a token has {top_k}")
    return count, top_k


def expert_size(data: Metadata) -> int:
    """The width of an expert, which not every file says."""
    return data.shapes("ffn_down_exps.weight")[0][2]


def read_rope(data: Metadata, config: Config, default_base: float = 10000.0) -> Config:
    """The settings of rotary positions."""
    head_dim, base = config["head_dim"], data.number("rope.freq_base", default_base)
    rotated = data.whole("rope.dimension_count", head_dim)
    if rotated > head_dim:
        raise data.refused(f"claims to rotate {rotated} numbers of a head of {head_dim}")
    rope: Config = {"rope_type": "default", "rope_theta": base}
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    if base <= 0:
        raise data.refused(f"has {base} as rope.freq_base")
    factors = data.factors("rope_freqs.weight", rotated // 2)
    scaling = data.text("rope.scaling.type", "none")
    factor = data.number("rope.scaling.factor", 1.0)
    if factors is not None:
        return rope | {"rope_type": "factors", "factors": factors}
    if scaling == "linear" and factor != 1:
        return rope | {"rope_type": "linear", "factor": factor}
    if scaling == "yarn":
        return rope | _read_yarn(data, factor)
    if scaling not in ("none", "linear", "longrope"):
        raise data.refused(f"scales rotary positions as {scaling[:40]!r}, which is not read")
    return rope


def _read_yarn(data: Metadata, factor: float) -> Config:
    original = data.whole("rope.scaling.original_context_length")
    rope: Config = {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
    for theirs, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
        if data.has(f"rope.scaling.{theirs}"):
            rope[ours] = data.number(f"rope.scaling.{theirs}")
    return rope


def read_layer_types(data: Metadata, config: Config, period: int) -> list[str]:
    """Which layers have windows, by the flags of the file, or all but the last of so many."""
    layers = config["num_hidden_layers"]
    flags = data.flags("attention.sliding_window_pattern", layers)
    if flags is None:
        flags = [(number + 1) % period > 0 for number in range(layers)]
    return ["sliding_attention" if flag else "full_attention" for flag in flags]
