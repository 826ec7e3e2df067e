"""Code that models with a program share, whatever runs it: whether the files hold its weights, by which names."""

from __future__ import annotations

import logging
import math
import re
from collections import UserDict
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cbatch.base.quantization import Quantization
from cbatch.model.config import UnsupportedConfig
from cbatch.model.config_classes import text_config
from cbatch.model.families import read_program
from cbatch.model.ops.program import Program
from cbatch.model.stored import StoredWeights
from cbatch.model.tensor_names import HEAD, names_in_files

_log = logging.getLogger("cbatch")

_EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")

_NUMBERS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


def resolved(program: Program, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    """The tensors of the files by the names that the program has for them."""
    # Numbers of what is packed in files are made when they are asked for, and only shapes are.
    names = names_in_files(program, tensors.matrices if isinstance(tensors, StoredWeights) else tensors)
    if any(ours != theirs for ours, theirs in names.items()) or len(names) < len(tensors):
        tensors = _ReadLater({ours: partial(tensors.__getitem__, theirs) for ours, theirs in names.items()})
    if any(name.endswith(".experts.gate_up_proj") and name not in program.shapes for name in tensors):
        return _unstacked(tensors, program.shapes)
    return tensors


class _ReadLater(UserDict[str, Any]):
    """Tensors by other names than those of the files, each of which is read when it is asked for."""

    def __getitem__(self, name: str) -> Tensor:
        made: Tensor = self.data[name]()
        return made


def _unstacked(tensors: Mapping[str, Tensor], shapes: Mapping[str, tuple[int, ...]]) -> Mapping[str, Tensor]:
    """Of files that hold the matrices of all experts in one, for a program that names each.

    shapes: of the program's weights. Files may have the matrices of a stack as [depth, columns] (Qwen 3 VL).
    """

    def part_of(stack: str, number: int, part: str, columns: int) -> Tensor:
        matrix = tensors[stack][number]
        if len(matrix) != columns * (1 if part == "down" else 2):
            matrix = matrix.T
        return matrix if part == "down" else matrix.chunk(2)[part == "up"]

    parts, stacks = dict[str, Callable[[], Tensor]](), set[str]()
    for name, shape in shapes.items():
        match = _EXPERT.fullmatch(name)
        if match is not None and name not in tensors:
            prefix, number, part = match.groups()
            stack = f"{prefix}.{'down' if part == 'down' else 'gate_up'}_proj"
            if stack in tensors:
                stacks.add(stack)
                parts[name] = partial(part_of, stack, int(number), part, shape[0])
    return _ReadLater({name: partial(tensors.__getitem__, name) for name in tensors if name not in stacks} | parts)


def check_weights(program: Program, tensors: Mapping[str, Tensor]) -> int:
    """The number of parameters. Raises UnsupportedConfig unless the files hold exactly the weights of the program.

    tensors: by the program's names, see `resolved`
    """
    shapes = program.shapes
    spare = re.compile("|".join(program.spare))
    odd = {name for name in tensors if not spare.fullmatch(name)} ^ shapes.keys()
    if program.is_tied:
        odd.discard(HEAD)
    if odd:
        raise UnsupportedConfig(f"one of its weights is missing, or unknown in its family: {min(odd)}")
    wrong = [name for name, shape in shapes.items() if _shape_of(tensors, name) != shape]
    if wrong:
        raise UnsupportedConfig(f"the shape of {wrong[0]} does not match its config")
    return sum(math.prod(shape) for shape in shapes.values())


def _shape_of(tensors: Mapping[str, Tensor], name: str) -> tuple[int, ...]:
    """Raises UnsupportedConfig for a weight that is stored neither as numbers nor as integers that are read."""
    if isinstance(tensors, StoredWeights):
        return tensors.matrices[name].shape
    tensor = tensors[name]
    if tensor.dtype not in _NUMBERS:
        raise UnsupportedConfig(f"{name} is {str(tensor.dtype).removeprefix('torch.')}")
    return tuple(tensor.shape)


class ProgramModel:
    """A model with a program, on one device. The fields are those of `Model`.

    config:       of the text model
    generates:    whether it can continue texts: not if its files hold no output head, or if tokens see later ones
    quantization: how its matrices are kept as integers; None if they are not
    stored:       how its files keep the weights, for people; empty if they are plain numbers
    """

    num_parameters: int
    quantization: Quantization | None = None
    stored = ""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        """Raises UnsupportedConfig if there is no program for such a config."""
        self.config = text_config(config)
        program = read_program(config)
        for note in program.notes:
            _log.warning("%s", note)
        self.name, self.kind = program.name, program.kind
        self.is_causal = self.generates = program.is_causal
        self.dtype, self.device = dtype, device
        self.vocab_size, self.max_model_len = program.vocab_size, program.max_model_len
        self.short_context = program.short_context
        self.windows: list[int | None] = list(program.windows)
        self.layer_devices, self.state_devices = [device] * len(program.caches), [device] * len(program.states)
        self.use(program)

    def use(self, program: Program) -> None:
        """Makes a program, or the part of it that one of several processes computes, that of the model."""
        self.program = program
        self.layers, self.states = list(program.caches), list(program.states)

    def accept(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The tensors of the files by the program's names. Raises UnsupportedConfig unless they are its weights."""
        tensors = resolved(self.program, tensors)
        self.num_parameters = check_weights(self.program, tensors)
        self.stored = tensors.description if isinstance(tensors, StoredWeights) else ""
        return tensors
