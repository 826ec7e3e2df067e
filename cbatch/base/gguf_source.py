"""Names of GGUF models: a file, or a file of a Hugging Face repository as `ID:FILE.gguf`."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from cbatch.base.errors import ModelError, ModelNotFound

_PART = re.compile(r"(.*)-(\d{5})-of-(\d{5})\.gguf", re.IGNORECASE)
_MAX_PARTS = 1000


class HubFile(NamedTuple):
    """A file of a repository on the hub."""

    repository: str
    name: str


def is_gguf(source: str) -> bool:
    """Whether a model's name means a GGUF file, here or on the hub."""
    return source.lower().endswith(".gguf") and not Path(source).is_dir()


def hub_file(source: str) -> HubFile | None:
    """The file of the hub that a model's name means; None if it means one of this machine."""
    repository, separator, name = source.partition(":")
    if (
        not separator
        or not is_gguf(source)
        or Path(source).exists()
        or not re.fullmatch(r"[\w.-]+/[\w.-]+", repository)
    ):
        return None
    return HubFile(repository, name)


def split_names(name: str) -> list[str]:
    """The names of all parts of a model, of which one is given; only this one if it is not split."""
    match = _PART.fullmatch(name)
    if match is None:
        return [name]
    count = int(match[3])
    if not 1 <= int(match[2]) <= count <= _MAX_PARTS:
        raise ModelError(f"{name} is part {int(match[2])} of {count}, which cannot be.")
    ending = name[-5:]
    return [f"{match[1]}-{number:05}-of-{match[3]}{ending}" for number in range(1, count + 1)]


def gguf_paths(source: str, revision: str | None) -> list[Path]:
    """The files of a model, downloaded if they are on the hub. Raises ModelError if one is missing, and OSError."""
    found = hub_file(source)
    if found is None:
        paths = [Path(name) for name in split_names(source)]
        for path in paths:
            if not path.is_file():
                raise ModelNotFound(f"There is no file {path}.")
        return paths
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    try:
        return [Path(hf_hub_download(found.repository, name, revision=revision)) for name in split_names(found.name)]
    except LocalEntryNotFoundError:  # there is no network
        raise
    except EntryNotFoundError as error:
        raise ModelNotFound(f"{found.repository} has no file {found.name}.") from error
