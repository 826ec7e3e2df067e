"""The user's own folders, after XDG's standard (https://specifications.freedesktop.org/basedir-spec)."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Literal

_DEFAULTS = {"CACHE": ".cache", "STATE": ".local/state"}


def user_folder(kind: Literal["CACHE", "STATE"]) -> Path:
    """Where this program keeps what is of a kind, whether it exists or not. A relative path of XDG's is ignored.

    Raises RuntimeError if there is no home directory.
    """
    folder = Path(os.environ.get(f"XDG_{kind}_HOME", ""))
    return (folder if folder.is_absolute() else Path.home() / _DEFAULTS[kind]) / "cbatch"
