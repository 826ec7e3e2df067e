"""Says which devices there are, in a process of its own: torch is not imported in the one that asks."""

from __future__ import annotations

import torch

from cbatch.runtime.device import choose_device


class DeviceProbe:
    """What is asked there."""

    def devices(self, name: str) -> tuple[str, int, bool]:
        """The devices that `name` means: their kind and number, and whether they are AMD's. Raises ConfigError."""
        device = choose_device(name)
        return device.type, torch.get_device_module(device).device_count(), torch.version.hip is not None
