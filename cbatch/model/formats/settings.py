"""The quantization of a checkpoint, checked: its settings, and the tensors of its matrices."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cbatch.base.errors import ModelError
from cbatch.model.config import UnsupportedConfig
from cbatch.model.formats.matrices import EncodedMatrix
from cbatch.model.tensor_files import TensorHeader, Tensors

FLOATS = ("F16", "BF16", "F32")
"""Types of what is not quantized, scales among it."""

OF_MAKERS = (
    "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "model_name_or_path", "tokenizer",
    "model_file_base_name", "meta", "dataset", "batch_size", "use_exllama", "disable_exllama", "exllama_config",
    "max_input_length", "model_seqlen", "pad_token_id", "use_cuda_fp16", "cache_block_outputs", "backend", "lm_head",
    "block_name_to_quantize", "module_name_preceding_first_block", "modules_in_block_to_quantize", "pack_dtype", "mse",
    "desc_act", "sym", "act_group_aware", "offload_to_disk", "modules_to_not_convert", "method", "provider", "amp",
    "autoround_version", "enable_minmax_tuning", "enable_norm_bias_tuning", "enable_quanted_input", "iters", "lr",
    "gradient_accumulate_steps", "low_gpu_mem_usage", "low_cpu_mem_usage", "minmax_lr", "nsamples", "scale_dtype",
    "seqlen", "quant_block_list", "to_quant_block_names", "act_bits", "act_data_type", "act_dynamic", "act_group_size",
    "act_sym", "enable_alg_ext", "enable_adam", "static_kv_dtype", "static_attention_dtype", "modules_to_fuse",
    "do_fuse", "fuse_max_seq_len", "static_kv_granularity", "static_attention_granularity", "supported_types",
)  # fmt: skip
"""Settings of tools for integers that change nothing of what the tensors stand for, which show zero points, orders, and
what is quantized.
"""

Matrices = Iterator[tuple[str, EncodedMatrix]]
"""Matrices by the names of their weights."""


class UnreadQuantization(UnsupportedConfig):
    """Why quantized weights are not read."""


class Settings:
    """The `quantization_config` of a config.json, whose keys are understood or refused."""

    def __init__(self, values: Mapping[str, Any]) -> None:
        self._values = dict(values)
        self._read = {"quant_method"}
        self.method = str(values.get("quant_method"))

    def get(self, key: str, default: Any = None) -> Any:
        self._read.add(key)
        return self._values.get(key, default)

    def expect(self, key: str, *accepted: Any) -> Any:
        """One of the accepted values; the first of them if the key is absent or null."""
        value = self.get(key)
        value = accepted[0] if value is None else value
        if not any(value == one and isinstance(value, bool) == isinstance(one, bool) for one in accepted):
            raise self.unsupported(key, value)
        return value

    def rename(self, **old_names: str) -> None:
        """Reads values by the names that older files have for them."""
        for name, old in old_names.items():
            if (value := self.get(old)) is not None:
                self.expect(old, self._values.setdefault(name, value))

    def rules(self, key: str, read: Callable[[str, Settings], None]) -> None:
        """Reads the settings of some modules. Raises UnreadQuantization, with the rule, for one that is not read."""
        given = self.get(key) or {}
        for name, values in given.items() if isinstance(given, Mapping) else ((key, given),):
            try:
                one = Settings({"quant_method": self.method, **values})
                read(name, one)
                one.finish()
            except (UnreadQuantization, TypeError) as error:
                raise self.unsupported(key, {name: values}) from error

    def integers(self, key: str, *bits: int) -> tuple[list[int], list[int]]:
        """Bits that matrices may have, of these, and numbers that share a scale; the usual ones first.

        key: of the settings of some modules, by their names or patterns
        """
        found, sizes = [self.expect("bits", *bits)], [self.group_size()]

        def read(name: str, rule: Settings) -> None:
            rule.ignore(*OF_MAKERS)
            if name.startswith("-:") or (rule.get("bits") or 0) >= 16:  # not quantized
                rule.ignore("group_size", "data_type")
                return
            rule.expect("data_type", "int")
            found.append(rule.expect("bits", found[0], *bits))
            sizes.append(sizes[0] if rule.get("group_size") is None else rule.group_size())

        self.ignore(*OF_MAKERS)
        self.expect("data_type", "int")
        self.rules(key, read)
        return found, sizes

    def group_size(self) -> int:
        """Numbers of a row that share a scale; -1 for all."""
        value = self.get("group_size")
        value = 128 if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or (value < 1 and value != -1):
            raise self.unsupported("group_size", value)
        return value

    def block(self, key: str) -> tuple[int, int]:
        """Rows and columns that share a scale."""
        value = self.get(key)
        is_pair = isinstance(value, list | tuple) and len(value) == 2
        if not is_pair or not all(type(size) is int and size > 0 for size in value):
            raise self.unsupported(key, value)
        return value[0], value[1]

    def ignore(self, *keys: str) -> None:
        """Keys that say how the weights were made, or what others do with them."""
        self._read.update(keys)

    def finish(self) -> None:
        """Raises UnreadQuantization for a key that nobody has read, and that says something."""
        for key in sorted(self._values.keys() - self._read):
            if self._values[key] not in (None, False, "", [], {}):
                raise self.unsupported(key, self._values[key])

    def unsupported(self, key: str, value: Any) -> UnreadQuantization:
        shown = repr(value)
        shown = shown if len(shown) <= 80 else shown[:80] + "…"
        return UnreadQuantization(f"{self.method} weights with {key} = {shown} are not read")


class Headers:
    """The types and shapes of tensors, which must be as a format has them.

    used: names of tensors that were asked for, of which matrices are made
    """

    def __init__(self, tensors: Tensors) -> None:
        self.tensors = tensors
        self.used: set[str] = set()

    def modules(self, suffix: str) -> Iterator[str]:
        """The modules with a tensor of that name, such as the `model.layers.0.mlp.up_proj` of `.qweight`."""
        return (name.removesuffix(suffix) for name in self.tensors if name.endswith(suffix))

    def shape(self, name: str, types: Collection[str], dims: int) -> tuple[int, ...]:
        """Of a tensor. Raises ModelError if it is missing, or of other types or dimensions."""
        header = self._header(name)
        if header.type not in types or len(header.shape) != dims or min(header.shape, default=1) < 1:
            raise self.misshaped(name, f"{' or '.join(types)} in {dims} dimensions")
        return header.shape

    def check(self, name: str, types: Collection[str], *shapes: tuple[int, ...]) -> None:
        """Raises ModelError unless a tensor is there, and has one of the types and of the shapes."""
        header = self._header(name)
        if header.type not in types or header.shape not in shapes:
            raise self.misshaped(name, f"{' or '.join(types)} {' or '.join(str(list(shape)) for shape in shapes)}")

    def block(self, name: str, rows: int, depth: int, blocks: Collection[tuple[int, int]]) -> tuple[int, int]:
        """Rows and columns of a matrix that share a scale, given the name of its scales.

        blocks: the sizes that its settings name; else there is one number, or one for each row
        """
        shapes: dict[tuple[int, ...], tuple[int, int]] = {
            (): (rows, depth), (1,): (rows, depth), (1, 1): (rows, depth), (rows,): (1, depth), (rows, 1): (1, depth)
        }  # fmt: skip
        for high, wide in {(min(high, rows), min(wide, depth)) for high, wide in blocks}:
            count = -(-rows // high), -(-depth // wide)
            shapes[count] = shapes[count[0], 1, count[1], 1] = high, wide
        self.check(name, (*FLOATS, "F8_E8M0", "U8"), *shapes)
        return shapes[self.tensors.header(name).shape]

    @staticmethod
    def groups(size: int, depth: int) -> tuple[int, int]:
        """Numbers of a row that share a scale, and how many such groups it has. size: of the settings"""
        group = depth if size == -1 else min(size, depth)
        return group, -(-depth // group)

    def grouping(self, name: str, sizes: Iterable[int], depth: int, rows: int) -> tuple[int, int]:
        """The same of a matrix, given the name of its scales [groups, rows]. sizes: of which its settings tell"""
        found = sorted({self.groups(size, depth) for size in sizes})
        self.check(name, FLOATS, *((count, rows) for _, count in found))
        fitting = [one for one in found if one[1] == self.tensors.header(name).shape[0]]
        if len(fitting) > 1:
            raise self.misshaped(name, f"of groups of either {fitting[0][0]} or {fitting[1][0]}")
        return fitting[0]

    def is_nonzero(self, name: str) -> bool:
        """Whether a tensor has numbers other than 0."""
        self.used.add(name)
        return bool(self.tensors[name].float().any())

    def order(self, name: str, depth: int, group: int, groups: int) -> NDArray[np.int64] | None:
        """[depth] group of each number of a row; None if they lie in turn, or there is no such tensor."""
        if name not in self.tensors:
            return None
        self.check(name, ("I32", "I64"), (depth,))
        order = self.tensors[name].numpy().astype(np.int64)
        if (order == -1).all() or np.array_equal(order, np.arange(len(order)) // group):
            return None
        if order.min() < 0 or order.max() >= groups:
            raise ModelError(f"Cannot load {self.tensors.folder}: {name} names groups other than 0 to {groups - 1}.")
        return order

    def misshaped(self, name: str, expected: str) -> ModelError:
        found = self._header(name)
        return ModelError(f"Cannot load {self.tensors.folder}: {name} is {found}, and should be {expected}.")

    def _header(self, name: str) -> TensorHeader:
        if name not in self.tensors:
            raise ModelError(f"Cannot load {self.tensors.folder}: its quantized weights lack {name}.")
        self.used.add(name)
        return self.tensors.header(name)


Reader = Callable[[Headers], Matrices]
"""Finds the matrices of a checkpoint. Raises ModelError for tensors that are missing or misshaped."""


class Method(NamedTuple):
    """How checkpoints of a `quant_method` are read.

    label: for people
    read:  understands a `quantization_config`, or raises UnreadQuantization
    """

    name: str
    label: str
    read: Callable[[Settings], Reader]
