"""Settings of Python for a process that computes."""

from __future__ import annotations

import gc
import sys

SWITCH_SECONDS = 5e-4


def tune_process() -> None:
    """Prepares Python for a process that has loaded a model and works on several threads.

    `freeze` keeps full garbage collections from walking over all of torch, which took half of the time of short rows.
    The switch interval bounds how long another thread may keep the interpreter while the engine waits for it.
    """
    gc.freeze()
    sys.setswitchinterval(SWITCH_SECONDS)
