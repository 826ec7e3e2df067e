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
    return [sys.executable, "-c", _RUN, json.dumps([sys.path, module, arguments])]
