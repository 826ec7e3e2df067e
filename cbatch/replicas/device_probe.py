"""Says which devices there are, in a process of its own: torch is not imported in the one that asks."""

from __future__ import annotations

import json

import torch

from cbatch.base.errors import ConfigError
from cbatch.runtime.device import choose_device


def main(name: str) -> None:
    """Prints the devices that `name` means, as JSON: their kind and number, and whether they are AMD's; or an error."""
    try:
        device = choose_device(name)
        count = torch.get_device_module(device).device_count()
        print(json.dumps({"kind": device.type, "count": count, "is_rocm": torch.version.hip is not None}))
    except ConfigError as error:
        print(json.dumps({"error": str(error)}))
