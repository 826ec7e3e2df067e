"""The tensors of safetensors files, mapped and read when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import safe_open
from torch import Tensor

from cbatch.base.model_files import InvalidFile, weight_files
from cbatch.runtime.memory import MappedFiles

_READS_BETWEEN_DROPS = 256
"""Packing reads a tensor for each piece of about a megabyte."""


class TensorHeader(NamedTuple):
    """A tensor as the header of its file has it. type: by the name it has there, such as `BF16`"""

    type: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.type} [{', '.join(map(str, self.shape))}]"


class Tensors(MappedFiles, Mapping[str, Tensor]):
    """The tensors of a folder's safetensors files by name, each read when it is asked for."""

    def __init__(self, folder: Path) -> None:
        """Raises InvalidFile for a file that is missing, and SafetensorError for one that is damaged."""
        super().__init__(tuple(weight_files(folder)))
        self.folder = folder
        for path in self.paths:
            if not path.is_file():  # opening a pipe would wait for its writer
                raise InvalidFile(f"There is no file {path}.")
        files = [safe_open(path, framework="pt") for path in self.paths]
        self._files = {key: file for file in files for key in file.keys()}  # type: ignore[no-untyped-call]  # noqa: SIM118
        self._num_reads = 0

    def __getitem__(self, name: str) -> Tensor:
        self._num_reads += 1
        if self._num_reads % _READS_BETWEEN_DROPS == 0:
            self.drop_pages()
        tensor: Tensor = self._files[name].get_tensor(name)  # type: ignore[no-untyped-call]
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._files)

    def __len__(self) -> int:
        return len(self._files)

    @property
    def num_bytes(self) -> int:
        return sum(path.stat().st_size for path in self.paths)

    def header(self, name: str) -> TensorHeader:
        """Type and shape of a tensor, which is not read for that."""
        part = self._files[name].get_slice(name)  # type: ignore[no-untyped-call]
        return TensorHeader(str(part.get_dtype()), tuple(part.get_shape()))

    def take(self, name: str, places: NDArray[np.int64], axis: int = 0, shape: tuple[int, ...] | None = None) -> Tensor:
        """A copy of some rows of a tensor, or of some columns, in the order of their places.

        shape: that the tensor is taken to have
        """
        tensor = self[name] if shape is None else self[name].view(shape)
        raw = tensor.view(torch.uint8) if tensor.element_size() == 1 else tensor  # torch cannot index float8
        if len(places) and np.array_equal(places, np.arange(places[0], places[0] + len(places))):
            taken = raw.narrow(axis, int(places[0]), len(places)).clone(memory_format=torch.contiguous_format)
        else:
            taken = raw.index_select(axis, torch.from_numpy(places))
        size = taken.numel() if axis == 0 else raw.numel()  # columns lie on all pages of a tensor
        self.count_read(size * raw.element_size())
        return taken.view(tensor.dtype)
