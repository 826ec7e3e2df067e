"""The record of a run in a small hidden file beside its output: its options, and what its keys come of.

Nothing but convenience depends on it: without the file, options are given again, and messages name all that may differ.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

from cbatch.base.errors import ConfigError, os_errors_as

Part = Literal["options", "keys"]


def record_path(output: Path) -> Path | None:
    """Where it lies for an output; None for a name that has no room for more."""
    path = output.with_name(f".{output.name}.cbatch-run")
    return path if len(os.fsencode(path.name)) < 250 else None


def read_record(output: Path) -> dict[str, Any]:
    """All parts; empty without a file. Raises ConfigError if it cannot be read."""
    if (path := record_path(output)) is None or not path.exists():
        return {}
    with os_errors_as(ConfigError, f"Cannot read {path}"):
        text = path.read_bytes()
    try:
        found = json.loads(text)
        return {name: dict(part) for name, part in found.items()}
    except (ValueError, TypeError, AttributeError):
        raise ConfigError(
            f"{path}, which holds the options of the run, is damaged; remove it, and give them again."
        ) from None


def write_record(output: Path, **parts: Mapping[str, Any]) -> None:
    """Replaces parts, and keeps the others. Raises ConfigError if that cannot be done."""
    if (path := record_path(output)) is None:
        return
    before = read_record(output)
    if (record := before | parts) != before:
        partial = path.with_name(f"{path.name}.new")
        with os_errors_as(ConfigError, f"Cannot write {path}"):
            partial.write_text(json.dumps(record, indent=1) + "\n")
            partial.replace(path)


def remove_record(output: Path) -> None:
    """Removes the file, if there is one."""
    if (path := record_path(output)) is not None:
        path.unlink(missing_ok=True)
