"""What a model is, in one short hash: its config, its tokenizer, and samples of every tensor."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from cbatch.engine.base.errors import ModelError

NAMES_AND_VERSIONS = ("_name_or_path", "name_or_path", "transformers_version", "tokenizer_file")
"""Keys of a model's JSON files that say where it came from, not what it is."""

TOKENIZER_FILES = ("tokenizer.json", "added_tokens.json", "vocab*", "merges.txt", "*.model")
SAMPLES, SAMPLE_BYTES = 8, 16


def fingerprint(folder: Path) -> str:
    """A hash of the model in a folder, 32 hexadecimal digits.

    Of each tensor a few bytes are read, at even distances, so that it takes no longer for a large model. Names,
    paths and times do not count. Raises ModelError for weights that are no safetensors files.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name in ("config.json", "tokenizer_config.json", "special_tokens_map.json"):
        digest.update(_settings(folder / name))
    for path in sorted(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()):
        digest.update(hashlib.blake2b(path.read_bytes()).digest())
    for path in _weight_files(folder):
        for sample in _samples(path):
            digest.update(sample)
    return digest.hexdigest()


def _settings(path: Path) -> bytes:
    """A JSON file's content without what is left out; empty where there is none."""
    try:
        content = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ModelError(f"{path} is not valid JSON: {error}.") from error
    if isinstance(content, dict):
        content = {name: value for name, value in content.items() if name not in NAMES_AND_VERSIONS}
    return json.dumps(content, sort_keys=True).encode()


def _weight_files(folder: Path) -> list[Path]:
    """The files that the weights are loaded from; other exports of them may lie beside."""
    index = folder / "model.safetensors.index.json"
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    if index.is_file():
        names = json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()
        return [folder / name for name in sorted(set(names))]
    return sorted(folder.glob("*.safetensors"))


def _samples(path: Path) -> Iterator[bytes]:
    """The header of a safetensors file (https://huggingface.co/docs/safetensors), then a few bytes of each tensor."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        header = file.read(length)
        yield header
        try:
            places = [value["data_offsets"] for name, value in json.loads(header).items() if name != "__metadata__"]
        except (ValueError, TypeError, KeyError) as error:
            raise ModelError(f"{path} is not a safetensors file.") from error
        for start, stop in places:
            yield from _spread(file, 8 + length + start, 8 + length + stop)


def _spread(file: BinaryIO, start: int, stop: int) -> Iterator[bytes]:
    """SAMPLES pieces of a part of a file, the first at its beginning and the last at its end."""
    last = max(stop - SAMPLE_BYTES, start)
    for place in sorted({start + (last - start) * number // (SAMPLES - 1) for number in range(SAMPLES)}):
        file.seek(place)
        yield file.read(min(SAMPLE_BYTES, stop - place))
