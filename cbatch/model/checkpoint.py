"""Loads the fast path straight from a model's config.json and safetensors, without transformers."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING

from safetensors import SafetensorError

from cbatch.base.errors import ConfigError, ModelError
from cbatch.base.hub import is_gguf, reachable_source
from cbatch.base.model_files import WEIGHT_FILES, InvalidFile, check_source, model_folder, weight_files
from cbatch.model.config import UnsupportedConfig, read_generation_config, read_model_config
from cbatch.model.families import read_program, text_config
from cbatch.model.fingerprint import fingerprint
from cbatch.model.formats.quantized import QuantizedCheckpoint, settings_of, without_quantization
from cbatch.model.load_plan import LoadPlan
from cbatch.model.lora.sites import sites_of
from cbatch.model.lora_files import Adapter
from cbatch.model.tensor_files import Tensors
from cbatch.runtime.memory import is_out_of_memory

if TYPE_CHECKING:
    from cbatch.model.cpu import CpuModel
    from cbatch.model.cuda import CudaModel

_log = logging.getLogger("cbatch")


class NoFastPath(Exception):
    """Why transformers has to load a model."""


def load_fast_model(plan: LoadPlan) -> CpuModel | CudaModel:
    """The model on the fast path.

    Raises NoFastPath if it has none, or if anything about its files is unusual: then transformers loads it, or says
    what is wrong. Raises ModelError if there is not enough memory, because transformers would need as much, and
    if quantized weights are damaged.
    """
    try:
        return _load(plan)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).partition(". ")[0].rstrip(".")
    except (UnsupportedConfig, InvalidFile, ImportError, OSError, SafetensorError) as error:
        if plan.quantize is not None:
            raise ConfigError(f"{plan.source} cannot be quantized to {plan.quantize.weights}: {error}.") from error
        _log.info("%s does not use the fast path: %s.", plan.source, error)
        raise NoFastPath(str(error)) from error
    # Raised here, where the weights that were loaded have been freed.
    raise ModelError(f"Cannot load {plan.source}: its weights do not fit into the memory of {plan.device} ({reason}).")


def check_adapters(adapters: Sequence[Adapter], plan: LoadPlan) -> None:
    """Raises ModelError for an adapter that does not fit the model in a folder, or of a hub id, by its config.json.

    Adapters of GGUF files, and of models without a fast path, are only checked once these are loaded.
    """
    check_source(plan.source)
    if is_gguf(plan.source):
        return
    try:
        config = read_model_config(model_folder(reachable_source(plan.source, plan.revision), plan.revision))
        program = read_program(without_quantization(config) if settings_of(config) is not None else config)
    except (OSError, UnsupportedConfig):
        return
    sites_of(program, adapters)


def _load(plan: LoadPlan) -> CpuModel | CudaModel:
    config = read_model_config(model_folder(plan.source, plan.revision))
    checkpoint = None
    if settings_of(config) is not None:
        checkpoint, config = QuantizedCheckpoint(config), without_quantization(config)
    program = read_program(config)  # before weights are downloaded
    folder = model_folder(plan.source, plan.revision, ["config.json", "generation_config.json", *WEIGHT_FILES])
    if "eos_token_id" not in {**text_config(config), **read_generation_config(folder)}:
        raise UnsupportedConfig("neither config.json nor generation_config.json has an eos_token_id")
    tensors, files, identity = Tensors(folder), weight_files(folder), partial(fingerprint, folder)
    if checkpoint is None:
        dtype, quantize = plan.formats(config.get("dtype", config.get("torch_dtype")), is_quantized=False)
        return plan.fast_model(config, tensors, dtype, quantize, files, identity)
    # On a GPU, and in bfloat16 on a CPU, matrices keep the integers of the files; else they become numbers.
    dtype, quantize = plan.formats("bfloat16", is_quantized=True)
    weights = checkpoint.weights(program, tensors)
    model = plan.fast_model(config, weights, dtype, quantize, files, identity)
    weights.finish(checkpoint.name, "the files", plan.device, dtype, model.weight_bytes, quantize)
    return model
