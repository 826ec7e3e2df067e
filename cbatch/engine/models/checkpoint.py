"""The fast path straight from a model's files: its config.json and safetensors, without transformers."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from cbatch.engine.base.errors import ConfigError, ModelError
from cbatch.engine.models.llama_spec import UnsupportedConfig, read_llama_spec
from cbatch.engine.runtime.dtypes import choose_dtype
from cbatch.engine.runtime.memory import is_out_of_memory

if TYPE_CHECKING:
    from cbatch.engine.models.cpu import CpuModel
    from cbatch.engine.models.cuda import CudaModel

_log = logging.getLogger("cbatch")

INDEX = "model.safetensors.index.json"


class Tensors(Mapping[str, Tensor]):
    """The tensors of a folder's safetensors files by name, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        names = ["model.safetensors"]
        if not (folder / names[0]).is_file():  # as transformers looks for them
            names = sorted(set(_read_json(folder / INDEX).get("weight_map", {}).values()))
        files = [safe_open(folder / name, framework="pt") for name in names]
        self._files = {key: file for file in files for key in file.keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def load_fast_model(
    source: str, revision: str | None, device: torch.device, dtype: str, *, quantize: bool = False
) -> CpuModel | CudaModel | None:
    """The model on the fast path; None where it has none, and where anything about its files is unusual.

    Then the other path loads it, or says what is wrong. For `quantize` see `CpuModel`. Raises ModelError where memory
    does not suffice, for the other path takes no less.
    """
    try:
        return _load(source, revision, device, dtype, quantize)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        trouble = str(error).partition(". ")[0].rstrip(".")
    except (UnsupportedConfig, ImportError, OSError, SafetensorError) as error:
        if quantize:
            raise ConfigError(f"{source} cannot be quantized to int8: {error}.") from error
        _log.info("%s goes without the fast path: %s.", source, error)
        return None
    # Here nothing holds the weights any more that were loaded.
    raise ModelError(f"Cannot load {source}: its weights do not fit into the memory of {device} ({trouble}).")


def _load(source: str, revision: str | None, device: torch.device, dtype: str, quantize: bool) -> CpuModel | CudaModel:
    folder = _folder(source, revision, ["config.json"])
    config = _read_json(folder / "config.json")
    read_llama_spec(config)  # before weights are downloaded
    names = ["generation_config.json", "model.safetensors", "model-*.safetensors", INDEX]
    folder = _folder(source, revision, ["config.json", *names])
    if "eos_token_id" not in config | _read_json(folder / "generation_config.json"):
        raise UnsupportedConfig("neither of its configs says what ends an output")
    number = torch.bfloat16 if quantize and dtype == "auto" else choose_dtype(dtype, _dtype_of(config), device)
    if device.type == "cuda":
        from cbatch.engine.models.cuda import CudaModel

        return CudaModel(config, Tensors(folder), number, device)
    from cbatch.engine.models.cpu import CpuModel

    return CpuModel(config, Tensors(folder), number, quantize=quantize)


def _read_json(path: Path) -> dict[str, Any]:
    """A JSON object; empty where there is no such file."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise UnsupportedConfig(f"{path.name} is not valid JSON") from error
    if not isinstance(content, dict):
        raise UnsupportedConfig(f"{path.name} is no object")
    return content


def _folder(source: str, revision: str | None, patterns: list[str]) -> Path:
    """The folder of a model, into which these files are downloaded from the hub where it is no folder."""
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, revision=revision, allow_patterns=patterns))


def _dtype_of(config: Mapping[str, Any]) -> torch.dtype | None:
    name = config.get("dtype", config.get("torch_dtype"))
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    return dtype if isinstance(dtype, torch.dtype) else None
