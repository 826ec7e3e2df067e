"""Files that options name: no two of them may be the same."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cbatch.engine import ConfigError

_FILES = {
    "input": "the input",
    "output": "the output",
    "stats": "the file of --stats",
    "source": "the file of --from",
    "prompts": "the file of --prompts",
}
"""What an option's file is called."""


def check_distinct_file(option: str, options: dict[str, Any], others: Sequence[str]) -> None:
    """Raises ConfigError where the file that an option names is that of one of the others too."""
    path = Path(options[option])
    for name in others:
        if options[name] in (None, "-"):
            continue
        other = Path(options[name])
        if os.path.realpath(path) == os.path.realpath(other) or (
            path.is_file() and other.is_file() and path.samefile(other)
        ):
            raise ConfigError(f"--{option} {path} is {_FILES[name]}; choose another file.")
