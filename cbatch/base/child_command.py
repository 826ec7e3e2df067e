"""How this process starts another one that runs a module of this package."""

from __future__ import annotations

import json
import sys

# Imports what its parent would, also from a folder that only the parent's command line or code has named.
_RUN = """
import json, sys
from importlib import import_module
sys.path[:], module, arguments = json.loads(sys.argv[1])
import_module(module).main(*arguments)
"""


def child_command(module: str, *arguments: str | int) -> list[str]:
    """The command of a process that calls `main(*arguments)` of a module."""
    path = [folder for folder in sys.path if isinstance(folder, str)]
    # -P: a file in the working folder must not be imported as json.
    return [sys.executable, "-P", "-c", _RUN, json.dumps([path, module, arguments])]
