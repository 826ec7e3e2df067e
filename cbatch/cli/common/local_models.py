"""The models that lie on this machine: in the hub's cache, and GGUF files where other programs keep them.

Only names and sizes of files are read, so that a list of many models takes no time. What cannot be read is left out.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from pathlib import Path
from typing import Literal

from huggingface_hub import constants

from cbatch.base.hub import is_mmproj

_GGUF_FOLDERS = ("~/.cache/llama.cpp", "~/.lmstudio/models", "~/.cache/lm-studio/models")
"""Where llama.cpp and LM Studio keep models."""

_MAX_DEPTH = 4
"""Folders below one with GGUF files that are looked into; LM Studio has publisher/model/file."""

_MIN_SIMILARITY = 0.6
_MAX_SUGGESTIONS = 3


@dataclass(frozen=True, slots=True)
class LocalModel:
    """A model on this machine.

    name:        hub id, or path of a folder or a GGUF file
    place:       folder or file where it lies
    modified_at: when it was put there, in seconds since 1970
    """

    name: str
    place: Path
    kind: Literal["hub", "folder", "gguf"]
    size_bytes: int
    modified_at: float


def local_models() -> list[LocalModel]:
    """All models that are found, by name: first those of the hub's cache, then GGUF files."""
    found = {model.name: model for model in _hub_models(Path(constants.HF_HUB_CACHE))}
    for folder in gguf_folders():
        found |= {model.name: model for model in _models_below(folder, _MAX_DEPTH) if model.kind == "gguf"}
    return sorted(found.values(), key=lambda model: (model.kind != "hub", model.name.lower()))


def models_below(folder: Path) -> list[LocalModel]:
    """The model folders and GGUF files in a folder, and below it, by name."""
    return sorted(_models_below(folder, _MAX_DEPTH), key=lambda model: model.name.lower())


def gguf_folders() -> list[Path]:
    """The folders that are searched for GGUF files: known ones, and those in CBATCH_GGUF_PATH."""
    added = os.environ.get("CBATCH_GGUF_PATH", "").split(":")
    return [Path(_expand(folder)) for folder in (*_GGUF_FOLDERS, *added) if folder]


def suggest_models(name: str) -> list[str]:
    """Names of local models that may be meant by one that does not exist, the likeliest first; often none.

    Compares whole names, and what follows the last slash of both, without regard to case. Model folders in the current
    folder, or beside the path that is named, count as well.
    """
    known = {model.name for model in local_models()}
    known.update(_folders_beside(name))
    known.discard(name)

    def similarity(other: str) -> float:
        a, b = name.lower().rstrip("/"), other.lower()
        ends = SequenceMatcher(None, a.rpartition("/")[2], b.rpartition("/")[2])
        return max(SequenceMatcher(None, a, b).ratio(), ends.ratio())

    rated = sorted((-similarity(other), other) for other in known)
    return [other for rating, other in rated if -rating >= _MIN_SIMILARITY][:_MAX_SUGGESTIONS]


def _hub_models(cache: Path) -> Iterator[LocalModel]:
    for repository in _entries(cache):
        kind, _, name = repository.name.partition("--")
        if kind != "models" or not name:
            continue
        snapshots = [model for one in _entries(Path(repository, "snapshots")) if (model := _model_folder(one.path))]
        if snapshots:
            yield replace(max(snapshots, key=lambda model: model.modified_at), name=name.replace("--", "/"), kind="hub")


def _model_folder(folder: str) -> LocalModel | None:
    """The model in a folder, if it has a configuration and weights, which may be links."""
    files = {entry.name: status for entry in _entries(folder) if (status := _status(entry)) is not None}
    weights = [status for file, status in files.items() if file.endswith(".safetensors")]
    if not weights or "config.json" not in files:
        return None
    size, newest = sum(one.st_size for one in weights), max(one.st_mtime for one in weights)
    return LocalModel(folder, Path(folder), "folder", size, newest)


def _models_below(folder: str | os.PathLike[str], depth: int) -> Iterator[LocalModel]:
    if (model := _model_folder(os.fspath(folder))) is not None:
        yield model
    for entry in _entries(folder):
        status = _status(entry)
        if status is not None and stat.S_ISDIR(status.st_mode):
            if depth and not entry.name.startswith("."):
                yield from _models_below(entry, depth - 1)
        elif status is not None and entry.name.lower().endswith(".gguf") and not is_mmproj(entry.name):
            yield LocalModel(entry.path, Path(entry.path), "gguf", status.st_size, status.st_mtime)


def _folders_beside(name: str) -> Iterator[str]:
    """Model folders in the current folder, and in the one of the path that is named, written as the name is."""
    path = Path(_expand(name))
    for parent in dict.fromkeys((path.parent, Path())):
        for entry in _entries(parent):
            if os.path.isfile(os.path.join(entry.path, "config.json")):  # noqa: PTH113, PTH118
                found = str(parent / entry.name)
                yield f"./{found}" if "/" not in found else found


def _entries(folder: str | os.PathLike[str]) -> list[os.DirEntry[str]]:
    try:
        with os.scandir(folder) as entries:
            return list(entries)
    except (OSError, ValueError):  # the latter for a path with a null character
        return []


def _status(entry: os.DirEntry[str]) -> os.stat_result | None:
    try:
        return entry.stat()
    except OSError:
        return None


def _expand(path: str) -> str:
    return os.path.expandvars(os.path.expanduser(path))  # noqa: PTH111 (Path.expanduser raises if there is no home)
