"""Mends Triton's interpreter where numpy has moved on: before 3.9 it made Python numbers of arrays of one element."""

from __future__ import annotations

from typing import Any

import numpy as np


def mend() -> None:
    """Lets kernels loop between bounds that they have loaded. Does nothing where they can."""
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
