"""Whether the weights of a model are in its files and fit into memory, before its network is made."""

from __future__ import annotations

import logging
from copy import deepcopy
from dataclasses import replace
from typing import Any

import torch

from cbatch.base.errors import ModelError, first_sentence
from cbatch.base.hub import gguf_paths, is_gguf, reachable_source
from cbatch.base.model_files import WEIGHT_FILES, StoredTensor, model_folder, stored_tensors, weight_files
from cbatch.base.units import format_bytes
from cbatch.model.config import read_model_config
from cbatch.model.device_map import DeviceMap
from cbatch.model.hf.placement import parameters_once
from cbatch.model.load_plan import LoadPlan, choose_dtype
from cbatch.runtime.memory import check_room

_MOST_TIMES, _PACKED = 2, 16
"""How many numbers a config may ask for, times those in the files: tied weights are stored once. Files of quantized
weights have up to 16 in one integer.
"""

_log = logging.getLogger("cbatch")


def fits(plan: LoadPlan, device_map: DeviceMap) -> bool:
    """Whether a model need not be spread, which is said then. Raises ModelError if its files cannot be had."""
    room, device = device_map.limits[str(device_map.device)], device_map.device
    size = weight_bytes(replace(plan, device=device))
    if not 0 < size <= room:  # 0: its files have other names than usual
        return False
    _log.warning(
        "The model is not spread: its weights (%s) fit on %s, where they may take %s. --device-map is not needed.",
        format_bytes(size), device, format_bytes(room),
    )  # fmt: skip
    return True


def weight_bytes(plan: LoadPlan) -> int:
    """Bytes of the weights on their device, without the rounding of `--quantize`; 0 if the files have unusual names.

    Raises ModelError if they cannot be had.
    """
    plan = replace(plan, source=reachable_source(plan.source, plan.revision))
    try:
        if is_gguf(plan.source):
            return sum(path.stat().st_size for path in gguf_paths(plan.source, plan.revision))
        tensors = _stored(plan)
    except OSError as error:
        raise ModelError(f"Cannot load {plan.source}: {first_sentence(error)}") from error
    config = read_model_config(model_folder(plan.source, plan.revision))
    kinds = [part.get(key) for part in (config, config.get("text_config") or {}) for key in ("dtype", "torch_dtype")]
    kind = choose_dtype(plan.dtype, next(filter(None, kinds), None), plan.device)
    return sum(one.num_elements * kind.itemsize if "F" in one.dtype else one.num_bytes for one in tensors)


def check_weights_fit(plan: LoadPlan, config: Any, dtype: torch.dtype) -> None:
    """Raises ModelError if a model has many more weights than its files, or they need more memory than there is.

    config: of transformers
    """
    stored, place = _stored(plan), model_folder(plan.source, plan.revision) / "config.json"
    if not stored:  # they have another name than usual
        return
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > len(stored):
        raise ModelError(
            f"{place} asks for {layers} layers, and the files of {plan.source} hold {len(stored)} tensors."
        )
    numbers, buffer_bytes = _sizes(config)
    found, stored_bytes = (sum(getattr(one, name) for one in stored) for name in ("num_elements", "num_bytes"))
    is_quantized = hasattr(config, "quantization_config")
    if numbers > found * (_PACKED if is_quantized else _MOST_TIMES):
        raise ModelError(
            f"{place} asks for weights of {format_bytes(numbers * dtype.itemsize)}, and the files of "
            f"{plan.source} hold {format_bytes(stored_bytes)}."
        )
    if plan.device_map is None:
        needed = stored_bytes if is_quantized else numbers * dtype.itemsize
        check_room(f"The weights of {plan.source}", needed + buffer_bytes, plan.device)


def _stored(plan: LoadPlan) -> list[StoredTensor]:
    """The tensors in a model's files, which are downloaded if they have to be."""
    folder = model_folder(plan.source, plan.revision, ["config.json", *WEIGHT_FILES])
    return [tensor for path in weight_files(folder) for tensor in stored_tensors(path).values()]


def auto_class(config: Any) -> Any:
    """The class that makes the network of a config: also of models of text with pictures or sound."""
    import transformers

    names = ("AutoModelForCausalLM", "AutoModelForImageTextToText", "AutoModelForMultimodalLM")
    found = [getattr(transformers, name) for name in names if hasattr(transformers, name)]
    return next((one for one in found if type(config) in one._model_mapping), found[0])


def _sizes(config: Any) -> tuple[int, int]:
    """Numbers of all parameters, and bytes of all buffers, of the network of a config, which is made without memory.

    Both are 0 if it cannot be made so, and loading it says why.
    """
    try:
        with torch.device("meta"):
            network = auto_class(config).from_config(deepcopy(config), trust_remote_code=False)
    except Exception:
        return 0, 0
    numbers = sum(parameter.numel() for parameter in parameters_once(network))
    return numbers, sum(buffer.numel() * buffer.element_size() for buffer in network.buffers())
