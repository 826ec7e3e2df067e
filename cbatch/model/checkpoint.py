"""Loads the fast path straight from a model's config.json and safetensors, without transformers."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError

from cbatch.base.errors import ConfigError, ModelError
from cbatch.base.gguf_source import is_gguf
from cbatch.base.hub import reachable_source
from cbatch.base.model_files import (
    WEIGHTS_INDEX,
    InvalidFile,
    check_source,
    model_folder,
    weight_files,
)
from cbatch.base.quantization import Quantization
from cbatch.model.config import UnsupportedConfig, read_generation_config, read_model_config
from cbatch.model.dtypes import choose_formats
from cbatch.model.families import read_program
from cbatch.model.fingerprint import fingerprint
from cbatch.model.formats.quantized import QuantizedCheckpoint, settings_of, without_quantization
from cbatch.model.lora.sites import sites_of
from cbatch.model.lora_files import Adapter
from cbatch.model.programs.program import Program
from cbatch.model.tensor_files import Tensors
from cbatch.runtime.device import is_accelerator
from cbatch.runtime.memory import is_out_of_memory

if TYPE_CHECKING:
    from cbatch.model.cpu import CpuModel
    from cbatch.model.cuda import CudaModel
    from cbatch.model.packed_file import PackedFile
    from cbatch.model.weight_cache import WeightCache

_log = logging.getLogger("cbatch")


class NoFastPath(Exception):
    """Why transformers has to load a model."""


def load_fast_model(
    source: str,
    revision: str | None,
    device: torch.device,
    dtype: str,
    *,
    quantize: Quantization | None = None,
    activations: str = "int8",
    weight_cache: WeightCache | None = None,
) -> CpuModel | CudaModel:
    """The model on the fast path. For `quantize` see `CpuModel`.

    Raises NoFastPath if it has none, or if anything about its files is unusual: then transformers loads it, or says
    what is wrong. Raises ModelError if there is not enough memory, because transformers would need as much, and
    if quantized weights are damaged.

    activations:  how rows are rounded that are multiplied with integers which the files have; see `Quantization`
    weight_cache: where packed weights are kept; for a CPU
    """
    try:
        return _load(source, revision, device, dtype, quantize, activations, weight_cache)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).partition(". ")[0].rstrip(".")
    except (UnsupportedConfig, InvalidFile, ImportError, OSError, SafetensorError) as error:
        if quantize is not None:
            raise ConfigError(f"{source} cannot be quantized to {quantize.weights}: {error}.") from error
        _log.info("%s does not use the fast path: %s.", source, error)
        raise NoFastPath(str(error)) from error
    # Raised here, where the weights that were loaded have been freed.
    raise ModelError(f"Cannot load {source}: its weights do not fit into the memory of {device} ({reason}).")


def check_adapters(adapters: Sequence[Adapter], source: str, revision: str | None) -> None:
    """Raises ModelError for an adapter that does not fit the model in a folder, or of a hub id, by its config.json.

    Adapters of GGUF files, and of models without a fast path, are only checked once these are loaded.
    """
    check_source(source)
    if is_gguf(source):
        return
    try:
        config = read_model_config(model_folder(reachable_source(source, revision), revision))
        program = read_program(without_quantization(config) if settings_of(config) is not None else config)
    except (OSError, UnsupportedConfig):
        return
    sites_of(program, adapters)


def _load(
    source: str,
    revision: str | None,
    device: torch.device,
    dtype: str,
    quantize: Quantization | None,
    activations: str,
    weight_cache: WeightCache | None,
) -> CpuModel | CudaModel:
    folder = model_folder(source, revision)
    config = read_model_config(folder)
    checkpoint = None
    if settings_of(config) is not None:
        checkpoint, config = QuantizedCheckpoint(config), without_quantization(config)
    program = read_program(config)  # before weights are downloaded
    names = ["generation_config.json", "model.safetensors", "model-*.safetensors", WEIGHTS_INDEX]
    folder = model_folder(source, revision, ["config.json", *names])
    if "eos_token_id" not in config | read_generation_config(folder):
        raise UnsupportedConfig("neither config.json nor generation_config.json has an eos_token_id")
    if checkpoint is not None:
        return _load_quantized(checkpoint, program, config, folder, device, dtype, quantize, activations, weight_cache)
    stored = config.get("dtype", config.get("torch_dtype"))
    number, quantize = choose_formats(dtype, stored, quantize, device, activations=activations, is_quantized=False)
    tensors = Tensors(folder)
    if is_accelerator(device):
        from cbatch.model.cuda import CudaModel

        return CudaModel(config, tensors, number, device, quantize=quantize)
    from cbatch.model.cpu import CpuModel

    shared = _packed_file(weight_cache, folder, number, quantize)
    return CpuModel(config, tensors, number, quantize=quantize, shared=shared)


def _load_quantized(
    checkpoint: QuantizedCheckpoint,
    program: Program,
    config: Mapping[str, Any],
    folder: Path,
    device: torch.device,
    dtype: str,
    quantize: Quantization | None,
    activations: str,
    weight_cache: WeightCache | None,
) -> CpuModel | CudaModel:
    """The model of a quantized checkpoint. On a GPU, and in bfloat16 on a CPU, matrices keep the integers of the files;
    else they become numbers.
    """
    number, quantize = choose_formats(dtype, "bfloat16", quantize, device, activations=activations, is_quantized=True)
    weights = checkpoint.weights(program, Tensors(folder))
    if is_accelerator(device):
        from cbatch.model.cuda import CudaModel

        on_device = CudaModel(config, weights, number, device, quantize=quantize)
        weights.finish(on_device.weight_bytes, number, quantize, keeps_float8=True)
        return on_device
    from cbatch.model.cpu import CpuModel

    shared = _packed_file(weight_cache, folder, number, quantize)
    model = CpuModel(config, weights, number, quantize=quantize, shared=shared)
    weights.finish(model.weight_bytes, number, quantize)
    return model


def _packed_file(
    cache: WeightCache | None, folder: Path, dtype: torch.dtype, quantize: Quantization | None
) -> PackedFile | None:
    """The file of packed weights for a model's folder."""
    from cbatch.model.packing import packed_weights

    return packed_weights(cache, fingerprint(folder), weight_files(folder), dtype, quantize) if cache else None
