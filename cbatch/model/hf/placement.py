"""Networks whose layers lie on several devices, in CPU memory or on disk: what lies where, and what steps have to read.

The hook of a module brings the module's inputs to its device before it runs, and its weights if they are kept
elsewhere (`accelerate/hooks.py` and `accelerate/utils/offload.py`, read in 1.15). Networks without hooks lie on one
device. accelerate is not imported here.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cbatch.base.model_files import StoredTensor, stored_tensors
from cbatch.base.units import format_bytes
from cbatch.runtime.device import is_accelerator
from cbatch.runtime.transfer import synchronize

SAMPLE_S = 0.3
SAMPLE_BYTES = 256 * 2**20
"""When a measurement of reading weights ends: after so many seconds, or bytes."""

CPU_MEMORY, DISK = "CPU memory", "disk"


@dataclass(slots=True)
class Place:
    """The weights in one place.

    weight_bytes: of the weights there, in memory or as they are stored
    read_bytes:   how much of it a step reads from there at most
    read_rate:    bytes a second, measured; 0 if nothing is read
    """

    name: str
    layers: set[int] = field(default_factory=set)
    others: dict[str, None] = field(default_factory=dict)
    weight_bytes: int = 0
    read_bytes: int = 0
    read_rate: float = 0.0

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
        """Sentences on what a step reads from elsewhere; empty if that is nothing."""
        read = [place for place in self.places if place.read_bytes]
        if not read:
            return ""
        amounts = " and ".join(f"{format_bytes(place.read_bytes)} from {place.name}" for place in read)
        rates = " and ".join(_rate(place.read_rate) for place in read)
        seconds = sum(place.read_bytes / place.read_rate for place in read)
        takes = f"{_figure(seconds)} s" if seconds >= 1 else f"{_figure(1000 * seconds)} ms"
        cached = "; what the system keeps in its page cache is read faster" if read[-1].name == DISK else ""
        return (
            f"A step reads up to {amounts}. At the {rates} measured now that takes {takes}, or "
            f"{_figure(1 / seconds)} tokens/s for each sequence{cached}. Sequences that run together share that time."
        )


def placement_of(network: Any) -> Placement:
    """Where the weights of a network lie that accelerate has spread; reads some of them to measure how fast that is."""
    main, weights = input_device(network), offloaded_weights(network)
    stored = _stored(weights)
    places: dict[str, Place] = {}
    elsewhere: dict[str, dict[str, int]] = {}
    device_map = getattr(network, "hf_device_map", {"": main})
    for name, parameter in network.named_parameters(remove_duplicate=False):
        place = places.setdefault(where := _place_name(device_map, name), Place(where))
        parts = name.split(".")
        if (number := next((part for part in parts if part.isdigit()), None)) is not None:
            place.layers.add(int(number))
        else:
            place.others[parts[-2] if len(parts) > 1 else parts[-1]] = None
        size = stored[name][1].num_bytes if name in stored else parameter.numel() * parameter.element_size()
        if where == DISK or (where == CPU_MEMORY and is_accelerator(main)):
            elsewhere.setdefault(where, {})[name] = size
        elif name in getattr(network, "all_tied_weights_keys", {}):
            continue
        place.weight_bytes += size
    for where, sizes in elsewhere.items():
        places[where].read_bytes = sum(sizes.values())
        places[where].read_rate = _read_rate(weights, sizes, stored, main)
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


def _stored(weights: Any) -> dict[str, tuple[Path, StoredTensor]]:
    """The file and the place in it of each weight on disk."""
    index = {} if weights is None else weights.index
    paths = {name: Path(entry["safetensors_file"]) for name, entry in index.items()}
    files = {path: stored_tensors(path) for path in set(paths.values())}
    return {name: (path, files[path][index[name]["weight_name"]]) for name, path in paths.items()}


def _read_rate(
    weights: Any, sizes: Mapping[str, int], stored: Mapping[str, tuple[Path, StoredTensor]], device: torch.device
) -> float:
    """Bytes a second of bringing weights to a device as a step does, those of the disk from the disk itself.

    The largest ones that end in time are read, since small ones only show how long a file takes to open.
    """
    count, seconds = 0, 0.0
    for name in sorted(sizes, key=lambda name: (sizes[name] > SAMPLE_BYTES, -sizes[name])):
        if name in stored and hasattr(os, "posix_fadvise"):  # else the system, macOS, cannot be asked to drop its cache
            path, tensor = stored[name]
            with suppress(OSError), path.open("rb") as file:
                os.fdatasync(file.fileno())  # what is not written yet stays
                os.posix_fadvise(file.fileno(), tensor.start, tensor.num_bytes, os.POSIX_FADV_DONTNEED)
        synchronize(device)
        start = time.perf_counter()
        _touch(weights[name].to(device))
        synchronize(device)
        seconds += time.perf_counter() - start
        count += sizes[name]
        if seconds > SAMPLE_S or count > SAMPLE_BYTES:
            break
    return count / max(seconds, 1e-9)


def _touch(tensor: Tensor) -> None:
    """Reads what a file of the CPU's memory maps, which happens only when it is used."""
    if tensor.device.type == "cpu":
        buffer, content = torch.empty(2**20, dtype=torch.uint8), tensor.reshape(-1).view(torch.uint8)
        for start in range(0, len(content), len(buffer)):
            part = content[start : start + len(buffer)]
            buffer[: len(part)].copy_(part)


def _rate(bytes_per_s: float) -> str:
    return f"{_figure(bytes_per_s / 1e9)} GB/s" if bytes_per_s >= 1e9 else f"{_figure(bytes_per_s / 1e6)} MB/s"


def _figure(number: float) -> str:
    """Two digits: 0.14, 1.2, 35, 1,200."""
    return f"{float(f'{number:.2g}'):,.12g}"


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
