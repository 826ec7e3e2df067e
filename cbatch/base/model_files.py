"""The files of a model: in a folder, or in the snapshot of a Hugging Face repository."""

from __future__ import annotations

import json
import math
import os
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Any

from cbatch.base.errors import ModelError
from cbatch.base.strict_json import is_too_deep
from cbatch.base.units import format_bytes

WEIGHTS_INDEX = "model.safetensors.index.json"
WEIGHT_FILES = ("model.safetensors", "model-*.safetensors", WEIGHTS_INDEX)
"""The names that the weights of a model have on the hub, of those that are read here."""

MODELOPT_FILE = "hf_quant_config.json"

MAX_JSON_BYTES, _MAX_JSON_VALUES = 2**26, 2**20
"""Of files of settings, and of vocabularies, of which the largest have half as much.

The index of a model of 10**12 parameters has 16 MiB and 140,000 values.
"""

MAX_HEADER_BYTES = 100_000_000
"""Of a safetensors file, as its library has it."""

_LIMITS: dict[str | tuple[str, ...], int] = {
    (".json", ".jinja", "merges.txt", "vocab.txt", ".model", ".tiktoken"): MAX_JSON_BYTES,
    ".safetensors": 0,
}
"""The most bytes of files with such endings that are read whole; 0 for those that are not."""

_SAMPLES, _SAMPLE_BYTES = 8, 16

_MAX_NAME, _MAX_PATH = 255, 4096
"""Bytes of the name of a file, and of a path (`limits.h` of Linux)."""


class InvalidFile(ModelError):
    """A file of a model that does not hold what it should."""


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a safetensors file: its type by the name it has there (`BF16`), and its bytes start .. stop-1."""

    dtype: str
    num_elements: int
    start: int
    stop: int

    @property
    def num_bytes(self) -> int:
        return self.stop - self.start


def check_source(source: str) -> None:
    """Raises ModelError for the name of a model that can be neither a path nor a hub id."""
    try:
        name = os.fsencode(source)
    except UnicodeEncodeError:
        name = b"\0"
    if b"\0" in name:
        raise ModelError("The name of a model or an adapter has a character that no path can have.")
    if len(name) >= _MAX_PATH or max(map(len, name.split(b"/"))) > _MAX_NAME:
        raise ModelError(f"The name of a model or an adapter has {len(name)} bytes, more than a path can have.")


def model_folder(source: str, revision: str | None, patterns: Sequence[str] = ("config.json", MODELOPT_FILE)) -> Path:
    """The folder `source`; for a hub id, its snapshot, into which the files that match are downloaded.

    Raises OSError if the hub cannot be reached and the snapshot is not in its cache.
    """
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, revision=revision, allow_patterns=list(patterns)))


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file.

    Raises InvalidFile, with line and column, if it is something else, larger than any file of settings, or nested too
    deep.
    """
    if not path.exists():
        return {}
    data = read_bounded(path)
    if data.count(b",") > _MAX_JSON_VALUES:
        raise InvalidFile(f"{path} holds more than {_MAX_JSON_VALUES} values.")
    try:
        content = json.loads(text := data.decode())
        if is_too_deep(text, content):
            raise RecursionError
        if b"\\ud" in data.lower():
            json.dumps(content, ensure_ascii=False).encode()  # raises for half a pair of surrogates
    except UnicodeDecodeError as error:
        before = data[: error.start]
        line, column = before.count(b"\n") + 1, len(before) - before.rfind(b"\n")
        raise InvalidFile(f"{path} is not valid JSON: line {line}, column {column} is not UTF-8.") from error
    except UnicodeEncodeError as error:
        raise InvalidFile(f"{path} is not valid JSON: it has half a surrogate pair.") from error
    except json.JSONDecodeError as error:
        place = f"line {error.lineno}, column {error.colno}"
        raise InvalidFile(f"{path} is not valid JSON: {place}: {error.msg}.") from error
    except ValueError as error:
        raise InvalidFile(f"{path} is not valid JSON: a number has too many digits.") from error
    except RecursionError as error:
        raise InvalidFile(f"{path} is nested too deep.") from error
    if not isinstance(content, dict):
        raise InvalidFile(f"{path} is not a JSON object.")
    return content


def read_bounded(path: Path) -> bytes:
    """All bytes of a file. Raises InvalidFile if it is no regular file or has more than MAX_JSON_BYTES, and OSError.

    A pipe is not waited for, and nothing is read that has no end.
    """
    with open_regular(path) as file:
        check_regular(path, os.fstat(file.fileno()), MAX_JSON_BYTES)
        data = file.read(MAX_JSON_BYTES + 1)
    if len(data) > MAX_JSON_BYTES:  # it grew, or belongs to the system and says no size
        raise _too_large(path, MAX_JSON_BYTES)
    return data


def open_regular(path: Path) -> BufferedReader:
    """Opens a file to read. Raises InvalidFile if it is no regular file; a pipe is not waited for."""
    check_regular(path, path.stat())
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOCTTY), "rb")
    try:
        check_regular(path, os.fstat(file.fileno()))  # it may have been replaced
    except InvalidFile:
        file.close()
        raise
    return file


def check_regular(path: Path, status: os.stat_result, limit: int | None = None) -> None:
    """Raises InvalidFile for what is no regular file, or is one with more bytes than the limit."""
    kinds = {stat.S_IFIFO: "a pipe", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device", stat.S_IFSOCK: "a socket",
             stat.S_IFDIR: "a folder"}  # fmt: skip
    if not stat.S_ISREG(status.st_mode):
        raise InvalidFile(f"{path} is {kinds.get(stat.S_IFMT(status.st_mode), 'something else')}, not a file.")
    if limit is not None and status.st_size > limit:
        raise _too_large(path, limit)


def check_files(folder: Path) -> None:
    """Raises InvalidFile if something in a model's folder cannot be read to its end, as a pipe or a device.

    Libraries that load a model open what has certain names, and wait for a pipe or read a device for ever. What is
    neither there nor a folder is theirs to report, except where a file is expected.
    """
    for place in (folder, folder / "additional_chat_templates"):
        with suppress(FileNotFoundError, NotADirectoryError), os.scandir(place) as entries:
            for path in map(Path, entries):
                limit = next((limit for endings, limit in _LIMITS.items() if path.name.endswith(endings)), None)
                with suppress(OSError):  # a link that leads nowhere
                    status = path.stat()
                    if limit is not None or not stat.S_ISDIR(status.st_mode):
                        check_regular(path, status, limit or None)


def _too_large(path: Path, limit: int) -> InvalidFile:
    return InvalidFile(f"{path} has more than {format_bytes(limit)}, which no such file of a model has.")


def sample_pieces(num_bytes: int) -> list[tuple[int, int]]:
    """Start and stop of a few short pieces of so many bytes, at even distances, from the first byte to the last."""
    last = max(num_bytes - _SAMPLE_BYTES, 0)
    starts = sorted({last * number // (_SAMPLES - 1) for number in range(_SAMPLES)})
    return [(start, min(start + _SAMPLE_BYTES, num_bytes)) for start in starts]


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers would load; other exports of the weights may lie beside them.

    Those that an index names need not be there. Raises InvalidFile if it names anything but files of the folder.
    """
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    index = folder / WEIGHTS_INDEX
    places = read_json_object(index).get("weight_map", None if index.exists() else {})
    if not isinstance(places, dict):
        raise InvalidFile(f"{index} has no weight_map that names a file for each tensor.")
    names = list(places.values())
    for name in names:
        if not isinstance(name, str) or Path(name).name != name or len(name) > _MAX_NAME or not name.isprintable():
            raise InvalidFile(f"{index} names {repr(name)[:80]}, which is no file of its folder.")
    return [folder / name for name in sorted(set(names))]


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name, from its header (https://huggingface.co/docs/safetensors).

    Raises InvalidFile for any other file, and OSError if it cannot be read.
    """
    with open_regular(path) as file:
        return tensors_of_header(read_header(file, path), path)


def tensors_of_header(header: bytes, path: Path) -> dict[str, StoredTensor]:
    """The tensors of a header that `read_header` has read, as `stored_tensors` gives them."""
    try:
        entries = json.loads(header)
        entries.pop("__metadata__", None)
        return {
            name: StoredTensor(
                entry["dtype"], math.prod(entry["shape"]), *(8 + len(header) + place for place in entry["data_offsets"])
            )
            for name, entry in entries.items()
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise InvalidFile(f"{path} is not a safetensors file.") from error


def read_header(file: BufferedReader, path: Path) -> bytes:
    """The header of a safetensors file, which begins with its length. Raises InvalidFile if it cannot have so much."""
    length = int.from_bytes(file.read(8), "little")
    if length > min(MAX_HEADER_BYTES, os.fstat(file.fileno()).st_size):
        raise InvalidFile(f"{path} is not a safetensors file.")
    return file.read(length)
