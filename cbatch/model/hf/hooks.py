"""What the hooks of accelerate say of a network whose layers lie on several devices, in CPU memory or on disk.

The hook of a module brings the module's inputs to its device before it runs, and its weights if they are kept
elsewhere (`accelerate/hooks.py` and `accelerate/utils/offload.py`, read in 1.15). Networks without hooks lie on one
device. accelerate is not imported here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import nn


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
