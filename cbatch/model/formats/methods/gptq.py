"""GPTQ checkpoints (https://github.com/AutoGPTQ/AutoGPTQ, https://github.com/ModelCloud/GPTQModel).

A matrix [rows, depth] of integers of 4 or 8 bits is stored the other way round: `qweight` [depth * bits / 32, rows]
int32 has several numbers of a row in a word, and `qzeros` [groups, rows * bits / 32] the zero points of several rows.
They are stored minus one, unless `checkpoint_format` is gptq_v2. `scales` are [groups, rows]. `g_idx` [depth] is the
group of each number of a row: with `desc_act`, those of a group do not lie side by side.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cbatch.model.formats.matrices import ColumnMatrix, unpacked, unpacked_rows
from cbatch.model.formats.settings import FLOATS, Headers, Matrices, Method, Reader, Settings
from cbatch.model.stored import Rows

_OF_MAKERS = (
    "damp_percent", "damp_auto_increment", "static_groups", "true_sequential", "model_name_or_path", "tokenizer",
    "model_file_base_name", "meta", "dataset", "batch_size", "use_exllama", "disable_exllama", "exllama_config",
    "max_input_length", "model_seqlen", "pad_token_id", "use_cuda_fp16", "cache_block_outputs", "backend", "lm_head",
    "block_name_to_quantize", "module_name_preceding_first_block", "modules_in_block_to_quantize", "pack_dtype", "mse",
    "desc_act", "sym", "act_group_aware", "offload_to_disk", "modules_to_not_convert",
)  # fmt: skip
"""Settings that change nothing of what the tensors stand for; zero points and orders are read from these."""


def _read(settings: Settings) -> Reader:
    bits = settings.expect("bits", 4, 8)
    version = settings.expect("checkpoint_format", "gptq", "gptq_v2")
    settings.expect("format", version)
    settings.ignore(*_OF_MAKERS)
    size, each, shift = settings.group_size(), 32 // bits, int(version == "gptq")

    def matrices(headers: Headers) -> Matrices:
        for module in headers.modules(".qweight"):
            name, scale, zero, place = (f"{module}.{part}" for part in ("qweight", "scales", "qzeros", "g_idx"))
            words, rows = headers.shape(name, ("I32",), 2)
            depth = each * words
            group, groups = headers.groups(size, depth)
            headers.check(scale, FLOATS, (groups, rows))
            headers.check(zero, ("I32",), (groups, -(-rows // each)))
            order = headers.order(place, depth, group, groups)
            where = headers.tensors, name, rows, depth, scale
            made = GptqMatrix(*where, bits=bits, group=group, order=order, zero=zero, shift=shift)
            yield f"{module}.weight", made

    return matrices


METHOD = Method("gptq", "GPTQ", _read)


@dataclass(eq=False)
class GptqMatrix(ColumnMatrix):
    """shift: what has been subtracted from zero points"""

    shift: int = 0

    def codes(self, rows: Rows) -> NDArray[Any]:
        return unpacked(self.tensors.take(self.name, rows, axis=1).numpy().T, self.bits)

    def zeros(self, rows: Rows) -> NDArray[np.float32]:
        return unpacked_rows(self.tensors, self.zero, rows, self.bits, axis=1).astype(np.float32) + self.shift

    @cached_property
    def has_zeros(self) -> bool:
        zeros = unpacked(self.tensors[self.zero].numpy(), self.bits)[:, : self.rows]
        return bool((zeros != self.usual_zero - self.shift).any())
