"""Networks whose layers lie on several devices, in CPU memory or on disk: what lies where, and what steps have to read.

The hook of a module brings the module's inputs to its device before it runs, and its weights if they are kept
elsewhere (`accelerate/hooks.py` and `accelerate/utils/offload.py`, read in 1.15). Networks without hooks lie on one
device. accelerate is not imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import nn

from cbatch.base.model_files import stored_tensors
from cbatch.base.units import format_bytes
from cbatch.runtime.device import is_accelerator

CPU_MEMORY, DISK = "CPU memory", "disk"


@dataclass(slots=True)
class Place:
    """The weights in one place.

    weight_bytes: of the weights there, in memory or as they are stored
    read_bytes:   how much of it a step reads from there at most
    """

    name: str
    layers: set[int] = field(default_factory=set)
    others: dict[str, None] = field(default_factory=dict)
    weight_bytes: int = 0
    read_bytes: int = 0

    def __str__(self) -> str:
        layers = f"layer{'s' * (len(self.layers) > 1)} {_ranges(self.layers)}"
        what = ", ".join([*self.others, layers] if self.layers else self.others)
        return f"{what} {'in' if self.name == CPU_MEMORY else 'on'} {self.name} ({format_bytes(self.weight_bytes)})"


@dataclass(frozen=True, slots=True)
class Placement:
    """Where the weights of a model lie."""

    places: list[Place]

    def __str__(self) -> str:
        return "; ".join(map(str, self.places))

    @property
    def cost(self) -> str:
        """A sentence on what a step reads from elsewhere; empty if that is nothing."""
        amounts = [f"{format_bytes(place.read_bytes)} from {place.name}" for place in self.places if place.read_bytes]
        return f"A step reads up to {' and '.join(amounts)}, for all sequences together." if amounts else ""


def placement_of(network: Any) -> Placement:
    """Where the weights of a network lie that accelerate has spread."""
    main, stored = input_device(network), _stored_bytes(offloaded_weights(network))
    places: dict[str, Place] = {}
    device_map = getattr(network, "hf_device_map", {"": main})
    for name, parameter in network.named_parameters(remove_duplicate=False):
        place = places.setdefault(where := _place_name(device_map, name), Place(where))
        parts = name.split(".")
        if (number := next((part for part in parts if part.isdigit()), None)) is not None:
            place.layers.add(int(number))
        else:
            place.others[parts[-2] if len(parts) > 1 else parts[-1]] = None
        size = stored.get(name, parameter.numel() * parameter.element_size())
        if where == DISK or (where == CPU_MEMORY and is_accelerator(main)):
            place.read_bytes += size
        elif name in getattr(network, "all_tied_weights_keys", {}):
            continue
        place.weight_bytes += size
    return Placement(list(places.values()))


def _place_name(device_map: Mapping[str, Any], name: str) -> str:
    """The place of a parameter: that of the longest beginning of its name in accelerate's map."""
    parts = name.split(".")
    beginnings = (".".join(parts[:count]) for count in range(len(parts), -1, -1))
    given = next(device_map[beginning] for beginning in beginnings if beginning in device_map)
    return {"cpu": CPU_MEMORY, "disk": DISK}.get(str(given)) or str(as_device(given))


def _ranges(numbers: Iterable[int]) -> str:
    """0-11, 14: whole numbers in their order, neighbours together."""
    ranges: list[list[int]] = []
    for number in sorted(numbers):
        if ranges and ranges[-1][-1] == number - 1:
            ranges[-1][1:] = [number]
        else:
            ranges.append([number])
    return ", ".join("-".join(map(str, bounds)) for bounds in ranges)


def _stored_bytes(weights: Any) -> dict[str, int]:
    """The size of each weight on disk, in its file."""
    index = {} if weights is None else weights.index
    files = {path: stored_tensors(Path(path)) for path in {entry["safetensors_file"] for entry in index.values()}}
    return {name: files[entry["safetensors_file"]][entry["weight_name"]].num_bytes for name, entry in index.items()}


def input_device(network: Any) -> torch.device:
    """Where a network takes its inputs, and gives its logits."""
    for hook in _hooks_of(network):
        return as_device(hook.execution_device)
    device: torch.device = network.device
    return device


def accept_host_rows(network: Any) -> bool:
    """Whether the rows whose logits a network is to keep must be given on the host.

    They pick rows of hidden states. If these need not be on the device of the inputs, only an index on the host fits.
    Changes the hook of the network itself then, so that it leaves the index there.
    """
    hooks = [hook for module in network.modules() for hook in _hooks_of(module)]
    if len({as_device(hook.execution_device) for hook in hooks}) < 2:
        return False
    for root in _hooks_of(network):
        skipped = [root.skip_keys] if isinstance(root.skip_keys, str) else root.skip_keys or ()
        root.skip_keys = {*skipped, "logits_to_keep"}
    return True


def parameters_once(network: Any) -> Iterator[nn.Parameter]:
    """The parameters of a network, each once: on disk, tied weights are two parameters."""
    tied = getattr(network, "all_tied_weights_keys", {})
    for name, parameter in network.named_parameters():
        if not (parameter.is_meta and name in tied):
            yield parameter


def offloaded_weights(network: Any) -> Any:
    """The mapping from which hooks take weights by name; None if all weights are where they are used.

    It reads anew what is on disk. Its `state_dict` has the weights in CPU memory, its `index` the files of the others.
    """
    for module in network.modules():
        for hook in _hooks_of(module):
            if hook.weights_map is not None:
                return getattr(hook.weights_map, "dataset", hook.weights_map)
    return None


def keep_rewritten_weights(network: Any, folder: Path) -> None:
    """Opens the files of offloaded weights that lie in a folder, so that the folder can be removed.

    The system frees their memory on the disk when the process ends, however it ends.
    """
    weights = offloaded_weights(network)
    entries = [] if weights is None else weights.index.values()
    paths = {entry["safetensors_file"] for entry in entries if Path(entry["safetensors_file"]).parent == folder}
    network.cbatch_open_files = files = {path: Path(path).open("rb") for path in paths}  # noqa: SIM115
    for entry in entries:
        if entry["safetensors_file"] in files:
            entry["safetensors_file"] = f"{_OPEN_FILES}/{files[entry['safetensors_file']].fileno()}"


def as_device(given: Any) -> torch.device:
    """accelerate calls GPUs by their numbers."""
    return torch.device("cuda", given) if isinstance(given, int) else torch.device(given)


_OPEN_FILES = "/proc/self/fd" if sys.platform == "linux" else "/dev/fd"


def _hooks_of(module: Any) -> Iterator[Any]:
    """Those hooks of a module that bring something to a device."""
    hook: Any = getattr(module, "_hf_hook", None)
    for one in getattr(hook, "hooks", (hook,)):
        if getattr(one, "execution_device", None) is not None:
            yield one
