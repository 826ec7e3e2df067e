"""Reads the header of GGUF files (https://github.com/ggml-org/ggml/blob/master/docs/gguf.md), which may be damaged.

Whatever a file says is checked before it is believed: lengths against what is left of the file, counts against limits
that no model comes near, and the places of tensors against the file's size and each other. Nothing is allocated on a
file's word alone, and reading a header takes less than a second.
"""

from __future__ import annotations

import math
import mmap
import os
import stat
import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from cbatch.base.model_files import InvalidFile
from cbatch.model.formats.gguf_blocks import BLOCKS, block_name, values_of
from cbatch.runtime.memory import MappedFiles

MAGIC, VERSIONS = b"GGUF", (2, 3)

MAX_HEADER_BYTES = 2**26
MAX_ENTRIES = MAX_TENSORS = 2**16
MAX_NAME_BYTES, MAX_STRING_BYTES = 2**10, 2**23
MAX_STRINGS = 2**21
"""Limits that no model comes near: of the header, its metadata, tensors, names, texts, and texts in arrays."""

_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9

_TYPE = struct.Struct("<I")
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """A tensor of a GGUF file.

    shape: as torch has it, the rows of blocks last
    type:  number of its block type (see `gguf_blocks.py`)
    data:  [rows, bytes of a row], mapped
    """

    shape: tuple[int, ...]
    type: int
    data: NDArray[np.uint8]

    @property
    def numbers(self) -> Tensor:
        return values_of(self.type, self.data).view(self.shape)


class StringArray(Sequence[str]):
    """An array of texts in a header, whose lengths were checked; each is decoded when it is asked for."""

    def __init__(self, header: _Header, start: int, count: int) -> None:
        self._header, self._start, self._count = header, start, count

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[str]:
        memory, length, stop = self._header.memory, _LENGTH.unpack_from, self._start
        try:
            for _ in range(self._count):
                start = stop + _LENGTH.size
                stop = start + length(memory, stop)[0]
                yield memory[start:stop].decode()
        except UnicodeDecodeError as error:
            raise self._header.not_a_text() from error

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]


@dataclass(eq=False)
class GgufFile(MappedFiles):
    """The content of one or several GGUF files of a model.

    metadata: numbers, texts, and arrays of either
    headers:  the bytes before the tensors, of each file
    """

    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]
    headers: tuple[memoryview, ...]

    def take(self, tensor: GgufTensor, rows: NDArray[np.int64]) -> NDArray[np.uint8]:
        """Some rows of blocks, at least one."""
        first, stop = rows[0], rows[0] + len(rows)
        data = tensor.data[first:stop] if np.array_equal(rows, np.arange(first, stop)) else tensor.data[rows]
        self.count_read(data.nbytes)
        return data

    @property
    def num_bytes(self) -> int:
        return sum(tensor.data.nbytes for tensor in self.tensors.values())

    @property
    def architecture(self) -> str:
        name = self.metadata.get("general.architecture")
        if not isinstance(name, str):
            raise InvalidFile(f"{self.paths[0]} does not say which architecture its model has.")
        return name


def read_gguf(paths: Sequence[Path]) -> GgufFile:
    """The parts of one model. Raises InvalidFile for anything that is not a whole GGUF file, and OSError.

    paths: in the order of `gguf_paths`
    """
    headers = [_Header(path) for path in paths]
    tensors: dict[str, GgufTensor] = {}
    for number, header in enumerate(headers):
        part = header.metadata.get("split.no", 0), header.metadata.get("split.count", 1) or 1
        if part != (number, len(paths)):
            place = f"part {number + 1} of {len(paths)} of a GGUF model"
            raise InvalidFile(f"{header.path} is not {place}; parts must keep their names.")
        for name, tensor in header.tensors.items():
            if name in tensors:
                raise InvalidFile(f"The tensor {name[:80]!r} is in several parts of {paths[0]}.")
            tensors[name] = tensor
    total = headers[0].metadata.get("split.tensors.count", len(tensors))
    if total != len(tensors):
        raise InvalidFile(f"The parts of {paths[0]} hold {len(tensors)} tensors, but should hold {total}.")
    return GgufFile(tuple(paths), headers[0].metadata, tensors, tuple(header.bytes for header in headers))


class _Header:
    """A file's header, read and checked from its first byte to its last.

    memory: the file, mapped
    metadata, tensors: by name
    bytes: the header
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.memory = _mapped(path)
        self._size = len(self.memory)
        self._limit = min(self._size, MAX_HEADER_BYTES)
        self._num_strings = 0
        if self.memory[:4] != MAGIC:
            raise InvalidFile(f"{path} is not a GGUF file.")
        version = self._number(_TYPE, 4)
        if version not in VERSIONS:
            kind = "is big-endian" if version & 0xFFFF == 0 and version else f"has version {version}"
            raise InvalidFile(f"{path} {kind}; GGUF files of version 2 and 3 in little-endian order are read.")
        num_tensors, num_entries = self._number(_LENGTH, 8), self._number(_LENGTH, 16)
        if num_tensors > MAX_TENSORS or num_entries > MAX_ENTRIES:
            raise self._damaged(f"it claims to have {num_tensors} tensors and {num_entries} entries")
        self.metadata: dict[str, Any] = {}
        place = 24
        for _ in range(num_entries):
            place = self._read_entry(place)
        self.tensors: dict[str, GgufTensor] = {}
        self._read_tensors(place, num_tensors)

    def _damaged(self, why: str) -> InvalidFile:
        return InvalidFile(f"{self.path} is damaged: {why}.")

    def _number(self, form: struct.Struct, place: int) -> Any:
        if place + form.size > self._limit:
            raise self._damaged("its header does not end")
        return form.unpack_from(self.memory, place)[0]

    def string(self, place: int, most: int) -> tuple[str, int]:
        """A text, and where the next thing begins."""
        start, stop = self._span(place, most)
        try:
            return self.memory[start:stop].decode(), stop
        except UnicodeDecodeError as error:
            raise self.not_a_text() from error

    def not_a_text(self) -> InvalidFile:
        return self._damaged("a text in its header is not UTF-8")

    def _span(self, place: int, most: int) -> tuple[int, int]:
        length = self._number(_LENGTH, place)
        stop = place + 8 + length
        if length > most or stop > self._limit:
            raise self._damaged(f"a text in its header claims to have {length} bytes")
        return place + 8, stop

    def _end_of_texts(self, place: int, count: int) -> int:
        """Where so many texts end, as `_span` would say it: there are hundreds of thousands."""
        memory, limit, number = self.memory, self._limit - _LENGTH.size, _LENGTH.unpack_from
        for _ in range(count):
            length = number(memory, place)[0] if place <= limit else MAX_STRING_BYTES + 1
            if length > MAX_STRING_BYTES:
                self._span(place, MAX_STRING_BYTES)  # which raises
            place += _LENGTH.size + length
        if place > self._limit:
            raise self._damaged("its texts do not end")
        return place

    def _read_entry(self, place: int) -> int:
        key, place = self.string(place, MAX_NAME_BYTES)
        if key in self.metadata:
            raise self._damaged(f"it has {key[:80]!r} twice")
        kind = self._number(_TYPE, place)
        place += 4
        if kind == _STRING:
            self.metadata[key], place = self.string(place, MAX_STRING_BYTES)
        elif kind == _ARRAY:
            self.metadata[key], place = self._array(place, key)
        elif kind in _SCALARS:
            form = struct.Struct("<" + _SCALARS[kind])
            self.metadata[key] = self._number(form, place)
            place += form.size
        else:
            raise self._damaged(f"{key[:80]!r} has the unknown type {kind}")
        return place

    def _array(self, place: int, key: str) -> tuple[StringArray | list[Any], int]:
        kind, count = self._number(_TYPE, place), self._number(_LENGTH, place + 4)
        place += 12
        if kind == _STRING:
            self._num_strings += count
            if count > (self._limit - place) // 8 or self._num_strings > MAX_STRINGS:
                raise self._damaged(f"{key[:80]!r} claims to have {count} texts")
            return StringArray(self, place, count), self._end_of_texts(place, count)
        if kind not in _SCALARS:
            what = "holds arrays" if kind == _ARRAY else f"has elements of the unknown type {kind}"
            raise self._damaged(f"{key[:80]!r} {what}")
        numbers = np.dtype("<" + _SCALARS[kind])
        stop = place + count * numbers.itemsize
        if stop > self._limit or count > MAX_STRINGS:
            raise self._damaged(f"{key[:80]!r} claims to have {count} numbers")
        return np.frombuffer(self.memory, numbers, count, place).tolist(), stop

    def _read_tensors(self, place: int, count: int) -> None:
        table = []
        for _ in range(count):
            name, place = self.string(place, MAX_NAME_BYTES)
            num_dims = self._number(_TYPE, place)
            if not 1 <= num_dims <= 4:
                raise self._damaged(f"the tensor {name[:80]!r} has {num_dims} dimensions")
            sizes = [self._number(_LENGTH, place + 4 + 8 * i) for i in range(num_dims)]
            place += 4 + 8 * num_dims
            kind, offset = self._number(_TYPE, place), self._number(_LENGTH, place + 4)
            place += 12
            table.append((name, tuple(reversed(sizes)), kind, offset))
        self.bytes = memoryview(self.memory)[:place]
        if len({name for name, *_ in table}) != len(table):
            raise self._damaged("it has a tensor twice")
        start = -(-place // self._alignment) * self._alignment
        end, before = start, ""
        for name, shape, kind, offset in sorted(table, key=lambda each: each[3]):
            row, size = self._sizes(name, shape, kind)
            begin = start + offset
            if offset % self._alignment or begin + size > self._size:
                raise self._damaged(f"the tensor {name[:80]!r} is not within the file")
            if begin < end:
                raise self._damaged(f"the tensors {before[:80]!r} and {name[:80]!r} overlap")
            end, before = begin + size, name
            data = np.frombuffer(self.memory, np.uint8, size, begin).reshape(-1, row)
            self.tensors[name] = GgufTensor(shape, kind, data)

    @property
    def _alignment(self) -> int:
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or not 1 <= alignment <= 2**20 or alignment & (alignment - 1):
            raise self._damaged(f"its alignment is {str(alignment)[:80]}")
        return alignment

    def _sizes(self, name: str, shape: tuple[int, ...], kind: int) -> tuple[int, int]:
        """Bytes of a row of a tensor, and of all."""
        if kind not in BLOCKS:
            what = f"the tensor {name[:80]!r} in the format {block_name(kind)}"
            raise InvalidFile(f"{self.path} holds {what}, which is not read.")
        numbers, size = BLOCKS[kind]
        if min(shape) < 1 or shape[-1] % numbers:
            raise self._damaged(f"the tensor {name[:80]!r} has the shape {shape}")
        row = shape[-1] // numbers * size
        return row, row * math.prod(shape[:-1])


def _mapped(path: Path) -> mmap.mmap:
    """A file, mapped to read. Raises InvalidFile if it cannot be a GGUF file."""
    file = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # a pipe must not be waited for
    try:
        status = os.fstat(file)
        if not stat.S_ISREG(status.st_mode) or status.st_size < 24:
            raise InvalidFile(f"{path} is not a GGUF file.")
        return mmap.mmap(file, status.st_size, flags=mmap.MAP_PRIVATE, prot=mmap.PROT_READ)
    finally:
        os.close(file)
