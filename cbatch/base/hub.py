"""Where a model is: a folder or a GGUF file, or on the Hugging Face hub as an id or as `ID:FILE.gguf`.

Whether it can be had from the hub or its local cache is asked before anything is loaded.

The libraries that download retry for most of a minute, file by file, before they say that there is no network. One look
here takes two seconds at most. Its limits are for the connection and the first answer; a download may take its time.
"""

from __future__ import annotations

import queue
import re
import socket
import threading
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

from cbatch.base.errors import ModelError, ModelNotFound
from cbatch.base.model_files import check_source, weight_files

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
    is_here = not separator or not is_gguf(source) or Path(source).exists()
    is_id = re.fullmatch(r"[\w.-]+/[\w.-]+", repository)
    return HubFile(repository, name) if is_id and not is_here else None


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
    """The files of a model, downloaded if they are on the hub. Raises ModelError if one is missing, and OSError.

    With a model, the file of its vision tower is downloaded (see `mmproj_names`).
    """
    found = hub_file(source)
    if found is None:
        paths = [Path(name) for name in split_names(source)]
        for path in paths:
            if not path.is_file():
                raise ModelNotFound(f"There is no file {path}.")
        return paths
    from huggingface_hub import HfApi, hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    names, towers = split_names(found.name), []
    try:
        if not all(_cached_file(found.repository, name, revision) for name in names):
            towers = mmproj_names(HfApi().list_repo_files(found.repository, revision=revision), found.name)[:1]
        files = [Path(hf_hub_download(found.repository, name, revision=revision)) for name in towers + names]
        return files[len(towers) :]
    except LocalEntryNotFoundError:  # there is no network
        raise
    except EntryNotFoundError as error:
        raise ModelNotFound(f"{found.repository} has no file {found.name}.") from error


def mmproj_names(names: Iterable[str], model: str) -> list[str]:
    """Of names of files, those of vision towers of a GGUF model, which lie beside it or above, the likeliest first.

    That is one that is called after the model, and of several F16.
    """

    def plain(name: str) -> str:
        return re.sub(r"mmproj|b?f16|f32|q8_0|[^a-z0-9]", "", Path(name).stem.lower())

    def rank(name: str) -> tuple[int, bool, str]:
        is_after = plain(model).startswith(plain(name))
        return -len(plain(name)) if is_after else 1, re.search(r"(?<!b)f16", name.lower()) is None, name

    folders = Path(model).parent, Path()
    return sorted((one for one in names if is_mmproj(one) and Path(one).parent in folders), key=rank)


def mmproj_paths(source: str, model: Path) -> list[Path]:
    """The same as files. model: the first file of the model `source`"""
    found = hub_file(source)
    root = model.parents[found.name.count("/")] if found else model.parent
    names = [str(path.relative_to(root)) for folder in {root, model.parent} for path in folder.glob("*")]
    return [root / name for name in mmproj_names(names, str(model.relative_to(root)))]


def is_mmproj(name: str) -> bool:
    """Whether a file is called like the vision tower of a GGUF model."""
    return name.lower().endswith(".gguf") and "mmproj" in Path(name).name.lower()


CONNECT_TIMEOUT_S, ANSWER_TIMEOUT_S = 2.0, 10.0
"""Seconds for looking up the hub's address and connecting to it, and for its first answer."""

CACHED_TIMEOUT_S = 0.5
"""The same if the model is in the cache, where it can be taken from as well."""

_BUSY = (408, 429)
"""HTTP status codes of a hub that may answer later, besides those from 500 on."""

_COMMIT = re.compile("[0-9a-f]{40}")


def check_hub_model(source: str, revision: str | None) -> None:
    """Raises ModelNotFound if `source` is a hub id that is not in the cache and cannot be had. Takes what exists.

    It is for programs that can say so early, before they import what loads a model.
    """
    check_source(source)
    if not _is_path(source) and _cached(source, revision) is None:
        reachable_source(source, revision)


def reachable_source(source: str, revision: str | None) -> str:
    """Where to load a model from: `source`, or its folder in the local cache if the hub need not or cannot be asked.

    Raises ModelNotFound if it is a hub id that is neither in the cache nor on the hub.
    """
    check_source(source)
    if _is_path(source):
        return source
    from huggingface_hub import constants

    file, cached = hub_file(source), _cached(source, revision)
    if cached is not None and (file is not None or _COMMIT.fullmatch(revision or "")):  # a commit does not change
        return cached
    try:
        if constants.is_offline_mode():
            raise ModelNotFound(
                f"{source} is not in the local cache and HF_HUB_OFFLINE is set; check the name, or unset "
                "HF_HUB_OFFLINE to download it."
            )
        _ask_hub(file.repository if file else source, revision, constants.ENDPOINT, is_cached=cached is not None)
    except ModelNotFound:
        if cached is None:
            raise
        return cached
    return source


def _cached(source: str, revision: str | None) -> str | None:
    """Where the local cache has all files of a model of the hub, as a source; None if it does not.

    Raises ModelNotFound if `source` cannot be a hub id.
    """
    if (file := hub_file(source)) is not None:
        return source if all(_cached_file(file.repository, name, revision) for name in split_names(file.name)) else None
    if (config := _cached_file(source, "config.json", revision)) is None:
        return None
    weights = weight_files(config.parent)
    return str(config.parent) if weights and all(path.is_file() for path in weights) else None


def _cached_file(repository: str, name: str, revision: str | None) -> Path | None:
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(repository, name, revision=revision)
    except HFValidationError as error:
        raise ModelNotFound(f"There is no model folder {repository}, and a hub id cannot have this name.") from error
    return Path(path) if isinstance(path, str) else None


def looks_like_path(source: str) -> bool:
    """Whether a name can only be meant as a path: a hub id has one slash at most."""
    return source.startswith((".", "/", "~")) or source.count("/") > 1


def _is_path(source: str) -> bool:
    if is_gguf(source):
        return hub_file(source) is None
    return looks_like_path(source) or Path(source).exists()


def _ask_hub(source: str, revision: str | None, endpoint: str, *, is_cached: bool) -> None:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import GatedRepoError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError

    def missing(but: str) -> ModelNotFound:
        return ModelNotFound(
            f"{source} is not in the local cache and {endpoint} {but}; check the name, the network and HF_ENDPOINT "
            "(models in the cache work offline)."
        )

    if not can_connect(endpoint, CACHED_TIMEOUT_S if is_cached else CONNECT_TIMEOUT_S):
        raise missing("cannot be reached")
    try:
        timeout_s = CONNECT_TIMEOUT_S if is_cached else ANSWER_TIMEOUT_S
        HfApi().model_info(source, revision=revision, timeout=timeout_s)
    except RevisionNotFoundError as error:
        raise ModelNotFound(f"{source} has no revision {revision} on {endpoint}; check --revision.") from error
    except GatedRepoError:
        return  # loading it says what to do
    except RepositoryNotFoundError as error:
        raise ModelNotFound(
            f"{endpoint} has no model {source}, or it is private; check the name, or log in with `hf auth login`."
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status in _BUSY or status >= 500:
            return  # the download tries again
        raise missing(f"answers with HTTP status {status}") from error
    except Exception as error:  # each version of the hub's library has its own kinds for a connection that fails
        raise missing("cannot be reached") from error


def can_connect(endpoint: str, timeout_s: float) -> bool:
    """Whether something accepts connections at an endpoint, or at the proxy that leads there."""
    try:
        address = _address(endpoint)
    except ValueError:  # no URL
        return False
    answers: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def connect() -> None:
        try:
            socket.create_connection(address, timeout_s).close()
        except (OSError, UnicodeError):
            answers.put(False)
        else:
            answers.put(True)

    # In a thread, because looking up an address has no timeout of its own.
    threading.Thread(target=connect, name="cbatch-connect", daemon=True).start()
    try:
        return answers.get(timeout=timeout_s)
    except queue.Empty:
        return False


def _address(endpoint: str) -> tuple[str, int]:
    url = urlsplit(endpoint)
    proxies = getproxies()
    proxy = proxies.get(url.scheme) or proxies.get("all")
    if proxy and url.hostname and not proxy_bypass(url.hostname):
        url = urlsplit(proxy if "//" in proxy else f"http://{proxy}")
    if not url.hostname:
        raise ValueError(f"{endpoint} has no host")
    return url.hostname, url.port or (80 if url.scheme == "http" else 443)
