"""The machine and the model, on which all measurements depend."""

from __future__ import annotations

import platform
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cbatch import __version__
from cbatch.cli.common.loading import describe

if TYPE_CHECKING:
    from cbatch.engine import Engine


@dataclass(frozen=True, slots=True)
class Machine:
    """The device and the versions of what runs on it, named as in `--json`."""

    device: str
    threads: int
    system: str
    cbatch: str
    python: str
    torch: str
    transformers: str

    @classmethod
    def of(cls, engine: Engine) -> Machine:
        import torch
        import transformers

        device = torch.cuda.get_device_name(engine.device) if engine.device.type == "cuda" else _processor()
        return cls(
            device=device,
            threads=torch.get_num_threads(),
            system=platform.platform(),
            cbatch=__version__,
            python=platform.python_version(),
            torch=torch.__version__,
            transformers=transformers.__version__,
        )


def describe_model(engine: Engine) -> str:
    shown = describe(engine)
    return f"{shown['model']}, {shown['parameters']}, {shown['dtype']}, attention {shown['attention']}"


def _processor() -> str:
    """The name of the processor, if the system tells it."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        lines = []
    name = next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")
    return name or platform.processor() or platform.machine()
