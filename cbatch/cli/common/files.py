"""Checks that no two options name the same file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from cbatch.engine import ConfigError


def check_distinct_file(option: str, name: str, others: Mapping[str, str | None]) -> None:
    """Raises ConfigError if an option names a file that another option names already.

    name:   the file that `option` names
    others: the other files; each key says what the file is (“the input”). None and `-` are no files
    """
    path = Path(name)
    for what, other_name in others.items():
        if other_name in (None, "-"):
            continue
        other = Path(other_name)
        if os.path.realpath(path) == os.path.realpath(other) or (
            path.is_file() and other.is_file() and path.samefile(other)
        ):
            raise ConfigError(f"{option} {path} is {what}; choose another file.")
