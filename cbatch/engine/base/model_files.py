"""The files of a model: in a folder, or in the snapshot of a Hugging Face repository."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cbatch.engine.base.errors import ModelError

WEIGHTS_INDEX = "model.safetensors.index.json"


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


def model_folder(source: str, revision: str | None, patterns: Sequence[str] = ("config.json",)) -> Path:
    """The folder `source`; for a hub id, its snapshot, into which the files that match are downloaded.

    Raises OSError if the hub cannot be reached and the snapshot is not in its cache.
    """
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download

    return Path(snapshot_download(source, revision=revision, allow_patterns=list(patterns)))


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; empty if there is no such file. Raises InvalidFile if it is something else."""
    if not path.is_file():
        return {}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InvalidFile(f"{path} is not valid JSON: {error}.") from error
    except RecursionError as error:
        raise InvalidFile(f"{path} is nested too deep.") from error
    if not isinstance(content, dict):
        raise InvalidFile(f"{path} is not a JSON object.")
    return content


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files that transformers would load; other exports of the weights may lie beside them.

    Those that an index names need not be there. Raises InvalidFile if it names anything but files of the folder.
    """
    if (folder / "model.safetensors").is_file():
        return [folder / "model.safetensors"]
    places = read_json_object(folder / WEIGHTS_INDEX).get("weight_map", {})
    names = list(places.values()) if isinstance(places, dict) else [places]
    for name in names:
        if not isinstance(name, str) or Path(name).name != name:
            raise InvalidFile(f"{folder / WEIGHTS_INDEX} names {repr(name)[:80]}, which is no file of its folder.")
    return [folder / name for name in sorted(set(names))]


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """The tensors of a safetensors file by name, from its header (https://huggingface.co/docs/safetensors).

    Raises InvalidFile for any other file, and OSError if it cannot be read.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(length, path.stat().st_size)))
            header.pop("__metadata__", None)
            return {
                name: StoredTensor(
                    entry["dtype"], math.prod(entry["shape"]), *(8 + length + place for place in entry["data_offsets"])
                )
                for name, entry in header.items()
            }
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            raise InvalidFile(f"{path} is not a safetensors file.") from error
