"""An editor of the user's own."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import TextIO

from cbatch.cli.common.exits import UserError


class Editor:
    """Runs one editor at a time: `process`. `edit` blocks, so it is called on a thread of its own."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None

    def edit(self, text: str, terminal: TextIO) -> str:
        """Returns the text after the user edited it in $VISUAL or $EDITOR. Raises UserError if the editor fails."""
        name = os.environ.get("VISUAL") or os.environ.get("EDITOR") or "vi"
        try:
            command = shlex.split(name)
            with tempfile.TemporaryDirectory(prefix="cbatch-") as folder:  # 0700
                path = Path(folder, "message.md")
                path.write_text(text, encoding="utf-8", errors="replace")
                self.process = subprocess.Popen([*command, path], stdin=sys.stdin, stdout=terminal, stderr=terminal)
                code = self.process.wait()
                self.process = None
                if code != 0:
                    raise UserError(f"The editor {command[0]} ended with an error; nothing was changed.")
                return path.read_text(encoding="utf-8")
        except OSError as error:
            raise UserError(f"Cannot open the editor {name}: {error.strerror}; set $EDITOR to another one.") from error
        except UnicodeDecodeError as error:
            raise UserError(f"The editor {name} did not leave UTF-8 text; nothing was changed.") from error
        except ValueError as error:
            raise UserError(f"$EDITOR is not a command: {error}.") from error
