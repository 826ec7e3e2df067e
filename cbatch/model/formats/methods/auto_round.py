"""AutoRound checkpoints (https://github.com/intel/auto-round), whose tensors are those of GPTQ or AWQ.

`packing_format` says which, and whether zero points are stored minus one. `extra_config` has the settings of single
modules; those of 16 bits are not quantized.
"""

from __future__ import annotations

from cbatch.model.formats.methods.awq import awq_reader
from cbatch.model.formats.methods.gptq import gptq_reader
from cbatch.model.formats.settings import Method, Reader, Settings

_SHIFTS = {"auto_round:auto_gptq": 1, "auto_round:gptq": 1, "auto_round": 0, "auto_round:gptqmodel": 0}
_AWQ = ("auto_round:auto_awq", "auto_round:awq")


def _read(settings: Settings) -> Reader:
    packing = settings.expect("packing_format", *_SHIFTS, *_AWQ)
    if packing not in _AWQ:
        return gptq_reader(settings, "extra_config", shift=_SHIFTS[packing])
    return awq_reader(settings, "extra_config")


METHOD = Method("auto-round", "AutoRound", _read)
