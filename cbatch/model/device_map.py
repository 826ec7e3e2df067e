"""Spreads a model that is larger than its device over GPUs, then CPU memory, then disk, by accelerate.

accelerate decides which layer goes where, and its hooks bring weights and inputs to the device that computes. Here is
decided what it may take of each device, and whether it is needed at all.
"""

from __future__ import annotations

import errno
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError
from cbatch.base.run_folder import RunFolder
from cbatch.base.units import parse_memory
from cbatch.extras import require_package
from cbatch.runtime.device import is_accelerator, is_cuda, usable_gpus
from cbatch.runtime.memory import device_memory

SHARE = "80%"
"""Of what is free on a device, for weights. The rest is for the KV cache and for steps."""


@dataclass(frozen=True, slots=True)
class DeviceMap:
    """Where the weights of a model may go.

    device: which the model would be on if it fitted
    limits: bytes that weights may take, by the names of devices; what is left goes to disk
    folder: for weights that are rewritten for the disk; None: that of temporary files
    """

    device: torch.device
    limits: dict[str, int]
    folder: str | None = None

    @property
    def max_memory(self) -> dict[int | str, int]:
        """The limits as accelerate takes them."""
        return {name if name == "cpu" else int(name.partition(":")[2]): limit for name, limit in self.limits.items()}

    @contextmanager
    def offload_folder(self) -> Iterator[Path]:
        """A new folder in which weights are rewritten, removed at the end. Raises ConfigError if none can be made."""
        try:
            made = RunFolder("offload", None if self.folder is None else Path(self.folder))
        except OSError as error:
            where = f"--offload-folder {self.folder}" if self.folder else f"The folder {tempfile.gettempdir()}"
            raise ConfigError(
                f"{where} cannot be used: {error.strerror}. Weights that go to disk need a folder that is writable."
            ) from error
        with closing(made):
            yield made.path


def choose_device_map(config: EngineConfig, device: torch.device) -> DeviceMap | None:
    """The map that a config asks for; None if models are to stay on their device.

    Raises ConfigError if that device cannot be one of several, and for limits of devices that are not used.
    """
    if config.device_map == "none":
        return None
    require_package("accelerate")
    if is_accelerator(device) and not is_cuda(device):
        raise ConfigError(f"--device-map auto spreads a model over CUDA GPUs, CPU memory and disk, not from {device}.")
    given = config.max_memory or {}
    devices = [*usable_gpus(config.device, device), torch.device("cpu")]
    unused = sorted(set(given) - set(map(str, devices)))
    if unused:
        raise ConfigError(
            f"max_memory names {unused[0]}, which is not used: the model can be spread over "
            f"{', '.join(map(str, devices))} and the disk."
        )
    limits = {str(one): parse_memory(str(given.get(str(one), SHARE)), device_memory(one).free()) for one in devices}
    limits = {name: limit for name, limit in limits.items() if limit or name == "cpu"}
    if is_accelerator(device) and list(limits) == ["cpu"]:
        raise ConfigError("max_memory leaves no GPU to compute on; use --device cpu for that.")
    return DeviceMap(
        device if str(device) in limits else torch.device(next(iter(limits))), limits, config.offload_folder
    )


def is_disk_full(error: BaseException) -> bool:
    """Whether an error of writing weights means that the disk is full; safetensors has no type for it."""
    numbers = (errno.ENOSPC, errno.EDQUOT)
    return getattr(error, "errno", None) in numbers or any(f"(os error {one})" in str(error) for one in numbers)
