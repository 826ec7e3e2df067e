"""What lies where of a model that is spread over devices, and what each step has to read from elsewhere."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cbatch.base.model_files import StoredTensor, stored_tensors
from cbatch.base.units import format_bytes
from cbatch.model.hf.hooks import as_device, input_device, offloaded_weights
from cbatch.runtime.device import is_accelerator
from cbatch.runtime.transfer import synchronize

SAMPLE_S = 0.3
SAMPLE_BYTES = 256 * 2**20
"""When a measurement of reading weights ends: after so many seconds, or bytes."""

CPU_MEMORY, DISK = "CPU memory", "disk"


@dataclass(slots=True)
class Place:
    """What lies in one place.

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
        cached = "; what the system keeps in its page cache is read faster" if read[-1].name == DISK else ""
        return (
            f"A step reads up to {amounts}. At the {rates} measured now that takes {_seconds(seconds)}, or "
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
        _note_module(place, name)
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


def _note_module(place: Place, name: str) -> None:
    """Adds the module of a parameter to what lies in a place: a layer by its number, any other by its name."""
    parts = name.split(".")
    number = next((part for part in parts if part.isdigit()), None)
    if number is not None:
        place.layers.add(int(number))
    else:
        place.others[parts[-2] if len(parts) > 1 else parts[-1]] = None


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
    files: dict[str, dict[str, StoredTensor]] = {}
    found = {}
    for name, entry in ({} if weights is None else weights.index).items():
        path = entry["safetensors_file"]
        if path not in files:
            files[path] = stored_tensors(Path(path))
        found[name] = Path(path), files[path][entry["weight_name"]]
    return found


def _read_rate(
    weights: Any, sizes: Mapping[str, int], stored: Mapping[str, tuple[Path, StoredTensor]], device: torch.device
) -> float:
    """Bytes a second of bringing weights to a device as a step does, those of the disk from the disk itself.

    The largest ones that end in time are read, since small ones only show how long a file takes to open.
    """
    count, seconds = 0, 0.0
    for name in sorted(sizes, key=lambda name: (sizes[name] > SAMPLE_BYTES, -sizes[name])):
        if name in stored:
            _drop_cached(*stored[name])
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


def _drop_cached(path: Path, tensor: StoredTensor) -> None:
    """Asks the system to forget what it has cached of a tensor in a file. macOS cannot be asked."""
    if hasattr(os, "posix_fadvise"):
        with suppress(OSError), path.open("rb") as file:
            os.fdatasync(file.fileno())  # what is not written yet stays
            os.posix_fadvise(file.fileno(), tensor.start, tensor.num_bytes, os.POSIX_FADV_DONTNEED)


def _seconds(count: float) -> str:
    return f"{_figure(count)} s" if count >= 1 else f"{_figure(1000 * count)} ms"


def _rate(bytes_per_s: float) -> str:
    return f"{_figure(bytes_per_s / 1e9)} GB/s" if bytes_per_s >= 1e9 else f"{_figure(bytes_per_s / 1e6)} MB/s"


def _figure(number: float) -> str:
    """Two digits: 0.14, 1.2, 35, 1,200."""
    return f"{float(f'{number:.2g}'):,.12g}"
