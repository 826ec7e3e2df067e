"""The user's own editor on a text."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TextIO


def edit_text(text: str, terminal: TextIO) -> str:
    """What the user makes of a text in $VISUAL or $EDITOR; nothing where the editor ends with an error.

    Raises OSError where the editor cannot be started, UnicodeDecodeError where it leaves what is no text.
    """
    command = shlex.split(os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi")
    fd, name = tempfile.mkstemp(prefix="cbatch-", suffix=".md")  # 0600
    try:
        with os.fdopen(fd, "w", encoding="utf-8", errors="replace") as file:
            file.write(text)
        done = subprocess.run([*command, name], stdin=sys.stdin, stdout=terminal, stderr=terminal, check=False)
        return Path(name).read_text(encoding="utf-8") if done.returncode == 0 else ""
    finally:
        Path(name).unlink(missing_ok=True)
