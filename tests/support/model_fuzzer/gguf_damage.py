"""Damage to GGUF files: to an entry of the header, to a tensor's, or to bytes."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

from tests.support.model_fuzzer.documents import Generator, brief, pick

_NUMBERS = (0, 1, 2, 3, 7, 48, 2**31 - 1, 2**31, 2**32 - 1, 2**40, 2**63, 2**64 - 1)
_FORMATS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_TEXT, _ARRAY = 8, 9


def damaged_gguf(content: bytes, generator: Generator) -> tuple[bytes, str]:
    """A damaged copy of a file, and what is wrong with it."""
    if generator.random() < 0.3:
        return _with_damaged_bytes(content, generator)
    header = _Header.read(content)
    words = [_change(header, generator) for _ in range(int(generator.integers(1, 3)))]
    return header.file(), "; ".join(words)


@dataclass
class _Header:
    """entries: key, type and bytes of each; tensors: name, sizes, type and place of each; data: their numbers"""

    entries: list[tuple[bytes, int, bytes]]
    tensors: list[tuple[bytes, list[int], int, int]]
    data: bytes

    @classmethod
    def read(cls, content: bytes) -> _Header:
        tensors, entries, reader = [], [], _Reader(content)
        reader.take("I"), reader.take("I")
        num_tensors, num_entries = reader.take("Q"), reader.take("Q")
        for _ in range(num_entries):
            key, kind, start = reader.text(), reader.take("I"), reader.place
            reader.skip_value(kind)
            entries.append((key, kind, content[start : reader.place]))
        for _ in range(num_tensors):
            name, count = reader.text(), reader.take("I")
            tensors.append((name, [reader.take("Q") for _ in range(count)], reader.take("I"), reader.take("Q")))
        return cls(entries, tensors, content[-(-reader.place // 32) * 32 :])

    def file(self) -> bytes:
        parts = [b"GGUF", struct.pack("<IQQ", 3, len(self.tensors), len(self.entries))]
        for key, kind, value in self.entries:
            parts += [_text(key), struct.pack("<I", kind), value]
        for name, sizes, kind, place in self.tensors:
            parts += [_text(name), struct.pack("<I", len(sizes)), struct.pack(f"<{len(sizes)}Q", *sizes)]
            parts.append(struct.pack("<IQ", kind, place))
        start = b"".join(parts)
        return start + bytes(-len(start) % 32) + self.data


class _Reader:
    def __init__(self, content: bytes) -> None:
        self._content, self.place = content, 0

    def take(self, form: str) -> int:
        value: int = struct.unpack_from("<" + form, self._content, self.place)[0]
        self.place += struct.calcsize("<" + form)
        return value

    def text(self) -> bytes:
        size = self.take("Q")
        self.place += size
        return self._content[self.place - size : self.place]

    def skip_value(self, kind: int) -> None:
        if kind == _TEXT:
            self.text()
        elif kind == _ARRAY:
            inner, count = self.take("I"), self.take("Q")
            for _ in range(count):
                self.skip_value(inner)
        else:
            self.take(_FORMATS[kind])


def _text(text: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text


def _change(header: _Header, generator: Generator) -> str:
    if generator.random() < 0.35:
        return _change_tensor(header, generator)
    number = int(generator.integers(len(header.entries)))
    key, kind, _ = header.entries[number]
    match int(generator.integers(5)):
        case 0:
            del header.entries[number]
            return f"without {brief(key)}"
        case 1:
            header.entries[number] = (new := key + b"\x1b[31m\0"), kind, header.entries[number][2]
            return f"{brief(key)} is called {brief(new)}"
        case 2:
            header.entries.append((key, *_odd_value(generator)))
            return f"{brief(key)} twice"
        case 3 if kind in _FORMATS:
            size = struct.calcsize(_FORMATS[kind])
            value = (int(pick(generator, _NUMBERS)) % 2 ** (8 * size)).to_bytes(size, "little")
            header.entries[number] = key, kind, value
            return f"{brief(key)} = {value.hex()}"
        case _:
            kind, value = _odd_value(generator)
            header.entries[number] = key, kind, value
            return f"{brief(key)} is of type {kind}: {brief(value)}"


def _odd_value(generator: Generator) -> tuple[int, bytes]:
    """Type and bytes of a value."""
    texts = [b"", b"llama", b"x", b"\x1b[31m\x07", b"\xff", b"gpt2", b"y" * 100_000, b"{{ messages }}", b"{% for x in"]
    match int(generator.integers(4)):
        case 0:
            return _TEXT, _text(pick(generator, texts))
        case 1:
            kind = pick(generator, list(_FORMATS))
            return kind, generator.bytes(struct.calcsize(_FORMATS[kind])) if kind != 7 else b"\1"
        case 2:
            count = pick(generator, [0, 1, 3, 300])
            return _ARRAY, struct.pack("<IQ", 4, count) + generator.bytes(4 * count)
        case _:
            items = [pick(generator, texts) for _ in range(pick(generator, [0, 1, 300]))]
            return _ARRAY, struct.pack("<IQ", _TEXT, len(items)) + b"".join(map(_text, items))


def _change_tensor(header: _Header, generator: Generator) -> str:
    number = int(generator.integers(len(header.tensors)))
    name, sizes, kind, place = header.tensors[number]
    changed: Any = name, list(sizes), kind, place
    match int(generator.integers(7)):
        case 0:
            del header.tensors[number]
            return f"without the tensor {brief(name)}"
        case 1:
            changed[1][int(generator.integers(len(sizes)))] = pick(generator, _NUMBERS)
        case 2:
            changed = name, sizes[::-1] if generator.random() < 0.5 else [*sizes, 1], kind, place
        case 3:
            changed = name, sizes, pick(generator, [*range(42), 2**31]), place
        case 4:
            changed = name, sizes, kind, pick(generator, [*_NUMBERS, place + 32, header.tensors[0][3]])
        case 5:
            changed = header.tensors[0][0], sizes, kind, place
        case _:
            changed = pick(generator, [b"x", b"\x1b[2J", b"\xff", b"", name + b"\0", b"n" * 99_999]), sizes, kind, place
    header.tensors[number] = changed
    return f"the tensor {brief(name)} is {brief(changed)}"


def _with_damaged_bytes(content: bytes, generator: Generator) -> tuple[bytes, str]:
    """Random bytes, numbers or lengths changed, mostly in the header, or pieces cut out or doubled."""
    stop = content.index(b"output_norm.weight") + 64
    data, words = bytearray(content), []
    for _ in range(int(generator.integers(1, 4))):
        place = int(generator.integers(0, min(stop, len(data) - 8)))
        match int(generator.integers(0, 5)):
            case 0:
                data[place] = int(generator.integers(0, 256))
            case 1:
                struct.pack_into("<Q", data, place, pick(generator, _NUMBERS))
            case 2:
                struct.pack_into("<I", data, place, int(generator.integers(0, 2**32)))
            case 3:
                del data[place : place + int(generator.integers(1, 64))]
            case _:
                data = data[: int(generator.integers(0, len(data)))] if generator.random() < 0.3 else data
                data[place:place] = data[place : place + int(generator.integers(1, 64))]
        words.append(f"bytes at {place}")
        if len(data) < 32:
            break
    return bytes(data), ", ".join(words)
