"""Damage to weights: to the settings of quantization, to tensors, to the index, and to bytes."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbatch.base.model_files import WEIGHTS_INDEX
from tests.support.model_fuzzer.documents import ODD, Generator, damaged_bytes, pick, to_bytes

WEIGHTS = "model.safetensors"

MOST_BYTES = 2**24
"""Of a tensor that takes another one's place."""

_TYPES = {
    "BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "F8_E8M0": 1, "I16": 2, "F16": 2, "BF16": 2, "U16": 2,
    "I32": 4, "U32": 4, "F32": 4, "F64": 8, "I64": 8, "U64": 8, "C64": 8,
}  # fmt: skip
"""Bytes of a number of each type of safetensors."""


@dataclass
class Folder:
    """Content of a model's folder. header: of the tensors, whose numbers `data` has in their order"""

    config: dict[str, Any]
    header: dict[str, Any]
    data: bytes

    @classmethod
    def read(cls, path: Path) -> Folder:
        return cls.of(json.loads((path / "config.json").read_text()), (path / WEIGHTS).read_bytes())

    @classmethod
    def of(cls, config: dict[str, Any], content: bytes) -> Folder:
        length = struct.unpack_from("<Q", content)[0]
        return cls(config, json.loads(content[8 : 8 + length]), content[8 + length :])

    @property
    def names(self) -> list[str]:
        return [name for name in self.header if name != "__metadata__"]

    def tensor(self, name: str) -> bytes:
        start, stop = self.header[name]["data_offsets"]
        return self.data[start:stop]

    def put(self, name: str, kind: str, shape: list[int], content: bytes) -> None:
        """Adds a tensor or replaces it, and lays out the file anew."""
        tensors = {each: (self.header[each], self.tensor(each)) for each in self.names}
        tensors[name] = {"dtype": kind, "shape": shape}, content
        self._lay_out(tensors)

    def remove(self, name: str) -> None:
        self._lay_out({each: (self.header[each], self.tensor(each)) for each in self.names if each != name})

    def _lay_out(self, tensors: dict[str, tuple[dict[str, Any], bytes]]) -> None:
        self.header, self.data = {}, b""
        for name, (entry, content) in tensors.items():
            place = [len(self.data), len(self.data) + len(content)]
            self.header[name] = {**entry, "data_offsets": place}
            self.data += content

    def files(self) -> dict[str, bytes]:
        header = to_bytes(self.header)
        return {"config.json": to_bytes(self.config), WEIGHTS: struct.pack("<Q", len(header)) + header + self.data}


def damaged_weights(folder: Folder, generator: Generator) -> dict[str, bytes]:
    """The files of a damaged copy of a folder by name."""
    changed = deepcopy(folder)
    for _ in range(int(generator.integers(1, 3))):
        pick(generator, _CHANGES)(changed, generator)
    files = changed.files()
    match int(generator.integers(8)):
        case 0:
            header = 8 + min(struct.unpack_from("<Q", files[WEIGHTS])[0], len(files[WEIGHTS]) - 16)
            files[WEIGHTS] = damaged_bytes(files[WEIGHTS], generator, header)
        case 1:
            split_weights(files, changed, generator)
    return files


def _change_settings(folder: Folder, generator: Generator) -> None:
    """A value anywhere in the settings of the quantization becomes another one."""
    inner: Any = folder.config
    keys = ["quantization_config"] if "quantization_config" in folder.config else list(folder.config)
    while True:
        key = pick(generator, keys)
        if not isinstance(inner[key], dict) or not inner[key] or generator.random() < 0.1:
            inner[key] = pick(generator, ODD)
            return
        inner, keys = inner[key], list(inner[key])


def _change_config(folder: Folder, generator: Generator) -> None:
    folder.config[pick(generator, list(folder.config))] = pick(generator, ODD)


def _change_entry(folder: Folder, generator: Generator) -> None:
    """An entry of the header says something else than its tensor is."""
    if not folder.names:
        return
    name = pick(generator, folder.names)
    if not isinstance(folder.header[name], dict) or not isinstance(folder.header[name].get("shape"), list):
        return
    entry = folder.header[name] = dict(folder.header[name])
    match int(generator.integers(6)):
        case 0:
            entry["dtype"] = pick(generator, [*_TYPES, "F4", "F6_E2M3", *ODD])
        case 1:
            entry["shape"] = pick(generator, ODD)
        case 2 if entry["shape"]:
            entry["shape"] = list(entry["shape"])
            entry["shape"][int(generator.integers(len(entry["shape"])))] = pick(generator, ODD)
        case 3:
            other = folder.header[pick(generator, folder.names)]
            entry["data_offsets"] = pick(generator, [*ODD, other["data_offsets"] if _is_whole(folder) else None])
        case 4:
            place = list(entry["data_offsets"]) if _is_whole(folder) else [0, 1]
            place[int(generator.integers(2))] = pick(generator, ODD)
            entry["data_offsets"] = place
        case _:
            folder.header[name] = pick(generator, ODD)


def _change_tensor(folder: Folder, generator: Generator) -> None:
    """A tensor has another type and shape, which its file says as they are."""
    name, other = pick(generator, folder.names), folder.header[pick(generator, folder.names)]
    kind, shape = folder.header[name]["dtype"], list(folder.header[name]["shape"])
    match int(generator.integers(5)):
        case 0:
            kind = pick(generator, list(_TYPES))
        case 1 if shape:
            shape[int(generator.integers(len(shape)))] = pick(generator, [0, 1, 2, 31, 64, 128])
        case 2:
            shape = shape[::-1]
        case 3:
            shape = pick(generator, [[], [1], [1, 1], [0], [0, 2**62], [64], [2, 64], [64, 64], [1] * 70])
        case _:
            kind, shape = other["dtype"], other["shape"]
    size = math.prod(shape) * _TYPES.get(kind, 1)
    if size <= MOST_BYTES:
        folder.put(name, kind, shape, generator.bytes(size) if generator.random() < 0.5 else bytes(size))


def _add_tensor(folder: Folder, generator: Generator) -> None:
    """A module has a tensor more, as others have it or of anything."""
    ends = sorted({name.rpartition(".")[2] for name in folder.names})
    ends += ["g_idx", "weight_zero_point", "weight_g_idx", "bias", "input_scale", "qzeros", "weight_scale_inv", "x"]
    other = pick(generator, folder.names)
    name = f"{pick(generator, folder.names).rpartition('.')[0]}.{pick(generator, ends)}"
    folder.put(name, folder.header[other]["dtype"], folder.header[other]["shape"], folder.tensor(other))


def _remove_tensor(folder: Folder, generator: Generator) -> None:
    folder.remove(pick(generator, folder.names))


def _change_numbers(folder: Folder, generator: Generator) -> None:
    """Numbers of a tensor become others, of which some are neither numbers nor groups that there are."""
    name = pick(generator, folder.names)
    size = len(folder.tensor(name))
    content = pick(generator, [generator.bytes(size), b"\xff" * size, b"\x7f" * size, bytes(size)])
    folder.put(name, folder.header[name]["dtype"], folder.header[name]["shape"], content)


def _if_whole(change: Callable[[Folder, Generator], None]) -> Callable[[Folder, Generator], None]:
    """A change of a file whose header is still true."""

    def changed(folder: Folder, generator: Generator) -> None:
        if _is_whole(folder):
            change(folder, generator)

    return changed


_CHANGES: list[Callable[[Folder, Generator], None]] = [
    _change_settings, _change_settings, _change_config, _change_entry,
    *map(_if_whole, (_change_tensor, _change_tensor, _add_tensor, _remove_tensor, _change_numbers)),
]  # fmt: skip


def _is_whole(folder: Folder) -> bool:
    """Whether all entries of the header are still true."""
    entries = [folder.header[name] for name in folder.names]
    places = [isinstance(entry, dict) and entry.get("data_offsets") for entry in entries]
    lists = [place for place in places if isinstance(place, list) and len(place) == 2]
    true = all(type(one) is int for place in lists for one in place)
    return true and len(lists) == len(places) > 0 and all(map(_can_be_made, entries))


def _can_be_made(entry: dict[str, Any]) -> bool:
    kind, shape = entry.get("dtype"), entry.get("shape")
    return isinstance(kind, str) and isinstance(shape, list) and all(type(one) is int and one >= 0 for one in shape)


def split_weights(files: dict[str, bytes], folder: Folder, generator: Generator) -> None:
    """Gives the weights another name, which an index tells, or something else."""
    parts = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    files[parts[0]] = files.pop(WEIGHTS)
    if generator.random() < 0.5:
        files[parts[1]] = pick(generator, [files[parts[0]], files[parts[0]][:50], b"", b"\2" + bytes(7) + b"{}"])
    index: Any = {"metadata": {}, "weight_map": {name: pick(generator, parts) for name in folder.names}}
    match int(generator.integers(4)):
        case 0:
            others = ["../x.safetensors", "/dev/zero", "/dev/null", ".", "config.json"]
            index["weight_map"]["x"] = pick(generator, [*ODD, *others])
        case 1:
            index["weight_map"] = pick(generator, ODD)
        case 2:
            index = pick(generator, ODD)
    files[WEIGHTS_INDEX] = to_bytes(index)
