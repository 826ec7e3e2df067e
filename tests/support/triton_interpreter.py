"""Patches Triton's interpreter, which before 3.9 made Python numbers of one-element arrays, as numpy no longer can."""

from __future__ import annotations

from typing import Any

import numpy as np


def patch_loops() -> None:
    """Lets kernels loop between bounds that they have loaded; does nothing if they can."""
    try:
        int(np.zeros(1))  # type: ignore[call-overload]
    except TypeError:
        from triton.runtime import interpreter
    else:
        return
    patch = interpreter._patch_lang_tensor

    def patched(tensor: Any, *scope: Any) -> None:
        patch(tensor, *scope)
        tensor.__index__ = lambda self: int(self.handle.data.item())

    interpreter._patch_lang_tensor = patched
