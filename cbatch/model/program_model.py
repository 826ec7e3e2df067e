"""Code that models with a program share, whatever runs it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cbatch.base.quantization import Quantization
from cbatch.model.families import read_program, text_config
from cbatch.model.named_tensors import check_weights, resolved
from cbatch.model.stored import StoredWeights


class ProgramModel:
    """A model with a program, on one device. The fields are those of `Model`.

    config:       of the text model
    quantization: how its matrices are kept as integers; None if they are not
    stored:       how its files keep the weights, for people; empty if they are plain numbers
    """

    num_parameters: int
    quantization: Quantization | None = None
    stored = ""

    def __init__(self, config: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> None:
        """Raises UnsupportedConfig if there is no program for such a config."""
        self.config = text_config(config)
        self.program = program = read_program(config)
        self.name, self.kind = program.name, program.kind
        self.dtype, self.device = dtype, device
        self.vocab_size, self.max_model_len = program.vocab_size, program.max_model_len
        self.short_context = program.short_context
        self.layers, self.states = list(program.caches), list(program.states)
        self.windows: list[int | None] = list(program.windows)
        self.layer_devices, self.state_devices = [device] * len(self.layers), [device] * len(self.states)

    def accept(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The tensors of the files by the program's names. Raises UnsupportedConfig unless they are its weights."""
        tensors = resolved(self.program, tensors)
        self.num_parameters = check_weights(self.program, tensors)
        self.stored = tensors.description if isinstance(tensors, StoredWeights) else ""
        return tensors
