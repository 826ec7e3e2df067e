"""Compares the weights that a transformers config asks for with its files and with memory, before they are made.

transformers makes weights that are not in the files at random, as large as the config says, and only then reports them.
"""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import torch

from cbatch.base.errors import ModelError
from cbatch.base.model_files import WEIGHTS_INDEX, StoredTensor, model_folder, stored_tensors, weight_files
from cbatch.base.units import format_bytes
from cbatch.model.hf.hooks import parameters_once
from cbatch.runtime.memory import check_room

_MOST_TIMES, _PACKED = 2, 16
"""How many numbers a config may ask for, times those in the files: tied weights are stored once. Files of quantized
weights have up to 16 in one integer.
"""


def check_weights_fit(
    source: str, revision: str | None, config: Any, dtype: torch.dtype, device: torch.device | None
) -> None:
    """Raises ModelError if a model has many more weights than its files, or they need more memory than there is.

    config: of transformers
    device: where they are to be; None if they may be spread over several
    """
    names = ["config.json", "model.safetensors", "model-*.safetensors", WEIGHTS_INDEX]
    folder = model_folder(source, revision, names)
    stored = [tensor for path in weight_files(folder) for tensor in stored_tensors(path).values()]
    if not stored:  # they have another name than usual
        return
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > len(stored):
        raise ModelError(
            f"{folder / 'config.json'} asks for {layers} layers, and the files of {source} hold {len(stored)} tensors."
        )
    numbers, buffer_bytes = _sizes(config)
    found, is_quantized = sum(one.num_elements for one in stored), hasattr(config, "quantization_config")
    if numbers > found * (_PACKED if is_quantized else _MOST_TIMES):
        raise ModelError(
            f"{folder / 'config.json'} asks for weights of {format_bytes(numbers * dtype.itemsize)}, and the files of "
            f"{source} hold {format_bytes(_num_bytes(stored))}."
        )
    if device is not None:
        needed = _num_bytes(stored) if is_quantized else numbers * dtype.itemsize
        check_room(f"The weights of {source}", needed + buffer_bytes, device)


def _num_bytes(tensors: list[StoredTensor]) -> int:
    return sum(tensor.num_bytes for tensor in tensors)


def _sizes(config: Any) -> tuple[int, int]:
    """Numbers of all parameters, and bytes of all buffers, of the network of a config, which is made without memory.

    Both are 0 if it cannot be made so, and loading it says why.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(deepcopy(config), trust_remote_code=False)
    except Exception:
        return 0, 0
    numbers = sum(parameter.numel() for parameter in parameters_once(network))
    return numbers, sum(buffer.numel() * buffer.element_size() for buffer in network.buffers())
