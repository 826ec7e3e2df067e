"""Packages that only some uses need: whether they are there, and the command that installs them here."""

from __future__ import annotations

import json
import shlex
from contextlib import suppress
from importlib.metadata import PackageNotFoundError, distribution
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit
from urllib.request import url2pathname

from cbatch.base.errors import ConfigError

ROOT = Path(__file__).parents[1]
"""The folder that holds the package: that of a checkout, or of installed packages."""

EXTRAS = {
    "PIL": ("images", "Images need Pillow, the package"),
    "accelerate": ("device-map", "--device-map auto needs"),
    "av": ("video", "Videos need PyAV, the package"),
    "fsspec": ("remote", "Files that lie elsewhere need"),
    "jsonschema": ("validate", "Checks by a JSON schema need"),
    "llguidance": ("structured", "Structured output needs"),
    "matplotlib": ("plot", "Pictures need"),
    "mcp": ("mcp", "Servers of tools need"),
    "openpyxl": ("excel", "Workbooks (.xlsx) need"),
    "pyarrow": ("tables", "Parquet and zstd need"),
    "ray": ("ray", "--ray needs the package"),
}
"""For each package, the extra of `pyproject.toml` that brings it, and what it is for: the beginning of a sentence."""


def require_package(package: str) -> None:
    """Raises ConfigError if one of the packages of EXTRAS is missing. Does not import it."""
    with suppress(ValueError):  # it is loaded, and does not say from where
        if find_spec(package) is None:
            raise ConfigError(missing_package(package))


def missing_package(package: str, use: str = "") -> str:
    """The sentence for a missing package, with the command that installs it.

    use: what it is for here, instead of what EXTRAS says
    """
    extra, needed_for = EXTRAS[package]
    return f"{use or needed_for} {package}: {install_command(extra)}."


def install_command(extra: str) -> str:
    """The command that adds an extra to this installation: from the checkout, folder or repository it came from."""
    if (ROOT / "pyproject.toml").is_file():
        where = "." if Path.cwd() == ROOT else str(ROOT)
        return f"pip install -e {shlex.quote(f'{where}[{extra}]')}"
    return f"pip install {shlex.quote(_requirement(extra))}"


def _requirement(extra: str) -> str:
    """The argument for pip: a name if the package came from a registry, else where it came from (PEP 610)."""
    name = f"cbatch[{extra}]"
    try:
        origin: dict[str, Any] = json.loads(distribution("cbatch").read_text("direct_url.json") or "{}")
    except (PackageNotFoundError, ValueError):
        return name
    url = str(origin.get("url", ""))
    if "dir_info" in origin:
        return f"{url2pathname(urlsplit(url).path)}[{extra}]"
    if "vcs_info" in origin:
        return f"{name} @ {origin['vcs_info']['vcs']}+{url}@{origin['vcs_info']['commit_id']}"
    return f"{name} @ {url}" if url else name
