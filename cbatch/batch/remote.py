"""Input and output that lie elsewhere (https, s3, gs, hf and others), which a run reads and writes as local copies.

An input is fetched whole before the first row, so that it stays the same however long the run takes. An output is
written to a local file, with all that makes a run safe, and uploaded once it is complete.

Source: https://filesystem-spec.readthedocs.io, the protocol and its implementations.
"""

from __future__ import annotations

import hashlib
import logging
import shutil
from collections.abc import Iterator
from contextlib import closing, contextmanager
from importlib import import_module
from pathlib import Path
from typing import IO, Any
from urllib.parse import urlsplit

from cbatch.base.errors import CbatchError, ConfigError, RunFailed, in_short
from cbatch.base.run_folder import RunFolder
from cbatch.base.user_folders import user_folder
from cbatch.batch.forms import file_name, split_table
from cbatch.batch.writer import FileWriter
from cbatch.extras import missing_package

_SILENCE_S = 60
"""How long a server of https may send nothing."""

_TALKATIVE = ("gcsfs", "s3fs", "fsspec", "asyncio")
"""Loggers that tell each try with its traceback."""


def fetch(address: str) -> IO[bytes]:
    """The content, in a temporary file that goes when it is closed. Raises ConfigError."""
    system, path = _file_system(address)
    with closing(RunFolder("input")) as folder, _errors_as(ConfigError, f"Cannot read {address}"):
        target = folder.path / "rows"
        system.get_file(path, str(target))
        return target.open("rb")


def local_name(address: str) -> str:
    """The path, with the table of a database, of the local file of an output."""
    file, table = split_table(address)
    key = hashlib.blake2b(address.encode(), digest_size=8).hexdigest()
    path = user_folder("STATE") / "outputs" / key / file_name(file)
    return f"{path}#{table}" if table is not None else str(path)


class RemoteOutput:
    """The local file of an output, whose name is a function of the address: a later run finds what this one leaves.

    name: see `local_name`
    path: of the local file
    """

    def __init__(self, address: str) -> None:
        """Raises ConfigError if nothing can be written there."""
        self._address = address
        self._system, self._path = _file_system(split_table(address)[0])
        if urlsplit(address).scheme in ("http", "https"):
            raise ConfigError(f"Cannot write {address}: a web server takes no files; use s3://, gs:// or a local file.")
        self.name = local_name(address)
        self.path = Path(split_table(self.name)[0])
        self._folder = self.path.parent

    def prepare(self, *, resume: bool, overwrite: bool, has_others: bool) -> None:
        """Fetches what is there, for a run that goes on with it. Raises ConfigError if it is neither to go on nor away.

        A local file that an earlier run has left is newer than what is there.

        has_others: whether it may have other tables, which stay
        """
        with _errors_as(ConfigError, f"Cannot write {self._address}"):
            has_content = self._system.exists(self._path) and self._system.size(self._path) != 0
            if has_content and not (resume or overwrite):
                raise ConfigError(f"{self._address} exists and is not empty; {FileWriter.if_not_empty}.")
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            if has_content and ((resume and not self.path.exists()) or (overwrite and has_others)):
                self._system.get_file(self._path, str(self.path))

    def upload(self) -> None:
        """Puts the file to its place, and removes the local one. Raises RunFailed if that cannot be done."""
        kept = f"; its rows are in {self.path}, and --resume uploads them"
        with _errors_as(RunFailed, f"Cannot write {self._address}", kept):
            self._system.put_file(str(self.path), self._path)
        shutil.rmtree(self._folder, ignore_errors=True)


def _file_system(address: str) -> tuple[Any, str]:
    """The file system of such addresses, and the path in it. Raises ConfigError if a package is missing."""
    for name in _TALKATIVE:
        logging.getLogger(name).setLevel(logging.CRITICAL)
    options: dict[str, Any] = {}
    scheme = urlsplit(address).scheme
    try:
        fsspec: Any = import_module("fsspec.core")
        if scheme in ("http", "https"):
            aiohttp: Any = import_module("aiohttp")
            options["client_kwargs"] = {"timeout": aiohttp.ClientTimeout(total=None, sock_read=_SILENCE_S)}
        system, path = fsspec.url_to_fs(address, **options)
    except ImportError as error:
        raise ConfigError(missing_package("fsspec", f"Files at {scheme}:// need")) from error
    except ValueError as error:
        raise ConfigError(f"Cannot use {address}: {in_short(error)}.") from error
    return system, path


@contextmanager
def _errors_as(kind: type[CbatchError], what: str, after: str = "") -> Iterator[None]:
    try:
        yield
    except CbatchError:
        raise
    except Exception as error:  # each service has errors of its own
        reason = "there is no such file" if isinstance(error, FileNotFoundError) else in_short(error)
        raise kind(f"{what}: {reason}{after}.") from error
