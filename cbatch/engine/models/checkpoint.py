"""Loads the fast path straight from a model's config.json and safetensors, without transformers."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cbatch.engine.base.errors import ConfigError, ModelError
from cbatch.engine.base.model_files import WEIGHTS_INDEX, InvalidFile, model_folder, read_json_object, weight_files
from cbatch.engine.base.quantization import Quantization
from cbatch.engine.models.fingerprint import fingerprint
from cbatch.engine.models.programs.config_reader import UnsupportedConfig
from cbatch.engine.models.programs.declarations import read_program
from cbatch.engine.runtime.device import gpu_name, has_bfloat16, is_accelerator
from cbatch.engine.runtime.memory import drop_mapped_pages, is_out_of_memory

if TYPE_CHECKING:
    from cbatch.engine.models.cpu import CpuModel
    from cbatch.engine.models.cuda import CudaModel
    from cbatch.engine.models.packed_file import PackedFile
    from cbatch.engine.models.weight_cache import WeightCache

_log = logging.getLogger("cbatch")

_READS_BETWEEN_DROPS = 256
"""Packing reads a tensor for each piece of about a megabyte."""


class Tensors(Mapping[str, Tensor]):
    """The tensors of a folder's safetensors files by name, each read when it is asked for.

    The files are mapped. What has been read is dropped from time to time, so that a process need not hold a model and
    its packed weights at once; a tensor that is still in use reads its numbers again.
    """

    def __init__(self, folder: Path) -> None:
        self._paths = list(weight_files(folder))
        files = [safe_open(path, framework="pt") for path in self._paths]
        self._files = {key: file for file in files for key in file.keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118
        self._num_reads = 0

    def __getitem__(self, name: str) -> Tensor:
        self._num_reads += 1
        if self._num_reads % _READS_BETWEEN_DROPS == 0:
            drop_mapped_pages(self._paths)
        tensor: Tensor = self._files[name].get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


class NoFastPath(Exception):
    """Why transformers has to load a model."""


def load_fast_model(
    source: str,
    revision: str | None,
    device: torch.device,
    dtype: str,
    *,
    quantize: Quantization | None = None,
    weight_cache: WeightCache | None = None,
) -> CpuModel | CudaModel:
    """The model on the fast path. For `quantize` see `CpuModel`.

    Raises NoFastPath if it has none, or if anything about its files is unusual: then transformers loads it, or says
    what is wrong. Raises ModelError if there is not enough memory, because transformers would need as much.

    weight_cache: where packed weights are kept; for a CPU
    """
    try:
        return _load(source, revision, device, dtype, quantize, weight_cache)
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


def _load(
    source: str,
    revision: str | None,
    device: torch.device,
    dtype: str,
    quantize: Quantization | None,
    weight_cache: WeightCache | None,
) -> CpuModel | CudaModel:
    folder = model_folder(source, revision)
    config = read_json_object(folder / "config.json")
    read_program(config)  # before weights are downloaded
    names = ["generation_config.json", "model.safetensors", "model-*.safetensors", WEIGHTS_INDEX]
    folder = model_folder(source, revision, ["config.json", *names])
    if "eos_token_id" not in config | read_json_object(folder / "generation_config.json"):
        raise UnsupportedConfig("neither config.json nor generation_config.json has an eos_token_id")
    stored = config.get("dtype", config.get("torch_dtype"))
    number = torch.bfloat16 if quantize is not None and dtype == "auto" else choose_dtype(dtype, stored, device)
    if is_accelerator(device):
        if number == torch.bfloat16 and not has_bfloat16(device):
            raise UnsupportedConfig(f"{gpu_name(device)} does not compute in bfloat16")
        from cbatch.engine.models.cuda import CudaModel

        return CudaModel(config, Tensors(folder), number, device)
    from cbatch.engine.models.cpu import CpuModel

    tensors = Tensors(folder)
    shared = _packed_file(weight_cache, folder, number, quantize) if weight_cache else None
    return CpuModel(config, tensors, number, quantize=quantize, shared=shared)


def _packed_file(cache: WeightCache, folder: Path, dtype: torch.dtype, quantize: Quantization | None) -> PackedFile:
    """The file of packed weights for a model's folder. The fingerprint takes samples; times notice any other change."""
    from cbatch.engine.models.packed_file import PackedFile
    from cbatch.engine.models.packing import PACKING

    times = [(status.st_size, status.st_mtime_ns) for status in (path.stat() for path in weight_files(folder))]
    content = {"packing": PACKING, "model": fingerprint(folder), "files": times}
    weights = None if quantize is None else quantize.weights
    return PackedFile(cache, content | {"dtype": str(dtype), "quantize": weights})


def choose_dtype(name: str, checkpoint: torch.dtype | str | None, device: torch.device) -> torch.dtype:
    """The dtype by name; `auto` is the checkpoint's, or one that the device computes in.

    bfloat16 becomes float32 on a CPU without instructions for it, and float16 on a GPU without. The latter is said, as
    is a bfloat16 that was asked for and has to be emulated. Raises ConfigError for an unknown name.
    """
    names = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if name != "auto":
        if name not in names:
            raise ConfigError(f"There is no dtype {name!r}; use auto, float32, bfloat16 or float16.")
        if name == "bfloat16" and not has_bfloat16(device):
            _warn_once(
                f"{gpu_name(device)} does not compute in bfloat16: torch emulates it, without the kernels of this "
                "program; use --dtype float16 if that is too slow."
            )
        return names[name]
    if isinstance(checkpoint, str):
        checkpoint = getattr(torch, checkpoint, None)
    wanted = checkpoint if isinstance(checkpoint, torch.dtype) else torch.float32
    if device.type == "cpu" and not (wanted == torch.bfloat16 and _cpu_has_bfloat16()):
        return torch.float32
    if wanted == torch.bfloat16 and not has_bfloat16(device):
        _warn_once(
            f"{gpu_name(device)} does not compute in bfloat16, so the model runs in float16, whose numbers end at "
            "65504; if it gives no numbers (nan_logits), use --dtype float32."
        )
        return torch.float16
    return wanted


@cache
def _warn_once(sentence: str) -> None:
    """Logs a warning once in a process: the dtype of a model may be chosen twice, for the fast path and without it."""
    _log.warning(sentence)


def _cpu_has_bfloat16() -> bool:
    # torch has no public function for this; a build without these names lacks the instructions.
    names = ("_is_avx512_bf16_supported", "_is_amx_tile_supported")
    return any(getattr(torch.cpu, name, bool)() for name in names)
