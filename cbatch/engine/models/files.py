"""The fast path straight from a model's files: its config.json and safetensors, without transformers."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from cbatch.engine.dtypes import choose_dtype
from cbatch.engine.errors import ConfigError
from cbatch.engine.models.family import Unfit, read_family

if TYPE_CHECKING:
    from cbatch.engine.models.decoder import Decoder

INDEX = "model.safetensors.index.json"


class Tensors(Mapping[str, Tensor]):
    """The tensors of a folder's safetensors files by name, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        from safetensors import safe_open

        index = folder / INDEX
        if index.is_file():
            names = sorted(set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()))
        else:
            names = ["model.safetensors"]
        files = [safe_open(folder / name, framework="pt") for name in names]
        self._files = {key: file for file in files for key in file.keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118

    def __getitem__(self, name: str) -> Tensor:
        tensor: Tensor = self._files[name].get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)


def load_decoder(
    source: str, revision: str | None, device: torch.device, dtype: str, *, quantize: bool = False
) -> Decoder | None:
    """The model on the fast path; None where it has none, and where anything about its files is unusual.

    Then the other path loads it, or says what is wrong. For `quantize` see `Decoder`.
    """
    from safetensors import SafetensorError

    try:
        folder = _folder(source, revision)
        config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        read_family(config)
        from cbatch.engine.models.decoder import Decoder

        number = torch.bfloat16 if quantize and dtype == "auto" else choose_dtype(dtype, _dtype_of(config), device)
        return Decoder(config, Tensors(folder), number, quantize=quantize)
    except (Unfit, ImportError, OSError, KeyError, ValueError, SafetensorError) as error:
        if quantize:
            raise ConfigError(f"{source} cannot be quantized to int8: {error}.") from error
        return None


def _folder(source: str, revision: str | None) -> Path:
    """The folder of a model, downloaded from the hub where it is no folder."""
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, revision=revision, allow_patterns=["*.json", "*.safetensors", "*.jinja"]))


def _dtype_of(config: Mapping[str, Any]) -> torch.dtype | None:
    name = config.get("dtype", config.get("torch_dtype"))
    dtype = getattr(torch, name, None) if isinstance(name, str) else None
    return dtype if isinstance(dtype, torch.dtype) else None
