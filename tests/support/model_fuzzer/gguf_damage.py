"""Damage to GGUF files: to an entry of the header, to a tensor's, or to bytes."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf

from tests.support.model_fuzzer.documents import NUMBERS, Generator, damaged_bytes, pick

_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9
_TEXTS = [b"", b"llama", b"x", b"\x1b[31m\x07", b"\xff", b"gpt2", b"y" * 100_000, b"{{ messages }}", b"{% for x in"]


def damaged_gguf(path: Path, generator: Generator) -> bytes:
    """A damaged copy of a file."""
    if generator.random() < 0.3:
        content = path.read_bytes()
        return damaged_bytes(content, generator, content.index(b"output_norm.weight") + 64)
    header = _Header.read(path)
    for _ in range(int(generator.integers(1, 3))):
        change = _change_tensor if generator.random() < 0.35 else _change_entry
        change(header, generator)
    return header.file()


@dataclass
class _Header:
    """entries: key, type and bytes of each; tensors: name, sizes, type and place of each; data: their numbers"""

    entries: list[tuple[bytes, int, bytes]]
    tensors: list[tuple[bytes, list[int], int, int]]
    data: bytes

    @classmethod
    def read(cls, path: Path) -> _Header:
        reader = gguf.GGUFReader(path)
        fields = [[part.tobytes() for part in field.parts] for field in reader.fields.values()][3:]
        entries = [(key, int.from_bytes(kind, "little"), b"".join(rest)) for _, key, kind, *rest in fields]
        tensors = [
            (one.name.encode(), one.shape.tolist(), int(one.tensor_type), int(one.field.parts[-1][0]))
            for one in reader.tensors
        ]
        return cls(entries, tensors, reader.data[reader.data_offset :].tobytes())

    def file(self) -> bytes:
        parts = [b"GGUF", struct.pack("<IQQ", 3, len(self.tensors), len(self.entries))]
        for key, kind, value in self.entries:
            parts += [_text(key), struct.pack("<I", kind), value]
        for name, sizes, kind, place in self.tensors:
            parts += [_text(name), struct.pack("<I", len(sizes)), struct.pack(f"<{len(sizes)}Q", *sizes)]
            parts.append(struct.pack("<IQ", kind, place))
        start = b"".join(parts)
        return start + bytes(-len(start) % 32) + self.data


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _change_entry(header: _Header, generator: Generator) -> None:
    number = int(generator.integers(len(header.entries)))
    key, kind, value = header.entries[number]
    match int(generator.integers(5)):
        case 0:
            del header.entries[number]
        case 1:
            header.entries[number] = key + b"\x1b[31m\0", kind, value
        case 2:
            header.entries.append((key, *_odd_value(generator)))
        case 3 if kind in _FORMATS:
            size = struct.calcsize(_FORMATS[kind])
            header.entries[number] = key, kind, int(pick(generator, NUMBERS)).to_bytes(8, "little")[:size]
        case _:
            header.entries[number] = key, *_odd_value(generator)


def _odd_value(generator: Generator) -> tuple[int, bytes]:
    """Type and bytes of a value."""
    match int(generator.integers(4)):
        case 0:
            return _TEXT, _text(pick(generator, _TEXTS))
        case 1:
            kind = pick(generator, list(_FORMATS))
            return kind, generator.bytes(struct.calcsize(_FORMATS[kind])) if kind != 7 else b"\1"
        case 2:
            count = pick(generator, [0, 1, 3, 300])
            return _ARRAY, struct.pack("<IQ", 4, count) + generator.bytes(4 * count)
        case _:
            items = [pick(generator, _TEXTS) for _ in range(pick(generator, [0, 1, 300]))]
            return _ARRAY, struct.pack("<IQ", _TEXT, len(items)) + b"".join(map(_text, items))


def _change_tensor(header: _Header, generator: Generator) -> None:
    number, first = int(generator.integers(len(header.tensors))), header.tensors[0]
    name, sizes, kind, place = header.tensors[number]
    changed: list[Any] = [name, list(sizes), kind, place]
    match int(generator.integers(7)):
        case 0:
            del header.tensors[number]
            return
        case 1:
            changed[1][int(generator.integers(len(sizes)))] = pick(generator, NUMBERS)
        case 2:
            changed[1] = pick(generator, [sizes[::-1], [*sizes, 1]])
        case 3:
            changed[2] = pick(generator, [*range(42), 2**31])
        case 4:
            changed[3] = pick(generator, [*NUMBERS, place + 32, first[3]])
        case _:
            changed[0] = pick(generator, [first[0], b"x", b"\x1b[2J", b"\xff", b"", name + b"\0", b"n" * 99_999])
    header.tensors[number] = tuple(changed)
