"""Makes the transformers network of a model, once it is known that its weights are in its files and fit into memory.

transformers makes weights that are not in the files at random, as large as the config says, and only then reports them.
"""

from __future__ import annotations

import io
import logging
from contextlib import nullcontext, redirect_stderr
from copy import deepcopy
from functools import partial
from tempfile import gettempdir
from textwrap import shorten
from typing import Any

import torch

from cbatch.base.errors import CbatchError, ModelError
from cbatch.base.model_files import WEIGHT_FILES, StoredTensor, model_folder, stored_tensors, weight_files
from cbatch.base.units import format_bytes
from cbatch.model.config import read_model_config
from cbatch.model.device_map import DeviceMap, is_disk_full
from cbatch.model.hf.placement import keep_rewritten_weights, parameters_once
from cbatch.model.load_plan import LoadPlan, choose_dtype
from cbatch.runtime.memory import check_room

_MOST_TIMES, _PACKED = 2, 16
"""How many numbers a config may ask for, times those in the files: tied weights are stored once. Files of quantized
weights have up to 16 in one integer.
"""

_LONGEST_REASON = 300
"""Characters of a library's error."""

_log = logging.getLogger("cbatch")


def load_network(plan: LoadPlan) -> Any:
    """The transformers model, on its device and in its dtype, in evaluation mode; spread if the plan says so.

    Raises ModelError, with one sentence, for whatever transformers, the hub, safetensors or the device raise.
    """
    _silence_libraries()
    from transformers import AutoConfig, AutoModelForCausalLM

    source, revision, device_map = plan.source, plan.revision, plan.device_map
    config: Any = None
    try:
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
        number = choose_dtype(plan.dtype, getattr(config.get_text_config(), "dtype", None), plan.device)
        check_weights_fit(plan, config, number)
        load = partial(
            AutoModelForCausalLM.from_pretrained,
            source,
            revision=revision,
            config=config,
            dtype=number,
            use_safetensors=True,
            ignore_mismatched_sizes=True,  # else transformers prints a table of them
            trust_remote_code=False,
            output_loading_info=True,
        )
        # Libraries of quantized formats draw progress bars on stderr, terminal or not.
        draws_bars = bool(getattr(config, "quantization_config", None))
        with redirect_stderr(io.StringIO()) if draws_bars else nullcontext():
            if device_map is None:
                network, report = load()
            else:  # accelerate decides where its parts go
                with device_map.offload_folder() as folder:
                    given = {"max_memory": device_map.max_memory, "offload_folder": str(folder)}
                    network, report = load(device_map="auto", **given)
                    keep_rewritten_weights(network, folder)
        if not report["missing_keys"] and not report["mismatched_keys"]:
            return (network.to(plan.device) if device_map is None else network).eval()
    except CbatchError:
        raise
    except Exception as error:  # transformers, the hub, safetensors, json and the device each raise their own kinds
        if device_map is not None and is_disk_full(error):
            raise ModelError(
                f"Cannot load {source}: the disk of {device_map.folder or gettempdir()} is full, where weights are "
                "rewritten that are to stay on disk; name a folder with more room by --offload-folder."
            ) from error
        raise ModelError(f"Cannot load {source}: {_unknown_name(error, config) or first_sentence(error)}") from error
    for name, found, wanted in sorted(report["mismatched_keys"]):
        raise ModelError(
            f"Cannot load {source}: {name} is {list(found)} in its files, and {list(wanted)} by its config.json."
        )
    missing = sorted(report["missing_keys"])
    raise ModelError(f"Cannot load {source}: {len(missing)} of its weights are not in its files, such as {missing[0]}.")


def _silence_libraries() -> None:
    """Hides the warnings and progress bars of transformers, accelerate and the hub; their errors are still raised.

    Called just before they are used, because importing transformers takes long.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    for name in ("huggingface_hub", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)


def fits(plan: LoadPlan, device_map: DeviceMap) -> bool:
    """Whether a model need not be spread, which is said then. Raises ModelError if its files cannot be had."""
    room, device = device_map.limits[str(device_map.device)], device_map.device
    try:
        tensors = _stored(plan)
    except OSError as error:
        raise ModelError(f"Cannot load {plan.source}: {first_sentence(error)}") from error
    config = read_model_config(model_folder(plan.source, plan.revision))
    kinds = [part.get(key) for part in (config, config.get("text_config") or {}) for key in ("dtype", "torch_dtype")]
    kind = choose_dtype(plan.dtype, next(filter(None, kinds), None), device)
    size = sum(one.num_elements * kind.itemsize if "F" in one.dtype else one.num_bytes for one in tensors)
    if not 0 < size <= room:  # 0: its files have other names than usual
        return False
    _log.warning(
        "The model is not spread: its weights (%s) fit on %s, where they may take %s. --device-map is not needed.",
        format_bytes(size), device, format_bytes(room),
    )  # fmt: skip
    return True


def check_weights_fit(plan: LoadPlan, config: Any, dtype: torch.dtype) -> None:
    """Raises ModelError if a model has many more weights than its files, or they need more memory than there is.

    config: of transformers
    """
    stored, place = _stored(plan), model_folder(plan.source, plan.revision) / "config.json"
    if not stored:  # they have another name than usual
        return
    layers = getattr(config.get_text_config(), "num_hidden_layers", 0)
    if isinstance(layers, int) and layers > len(stored):
        raise ModelError(
            f"{place} asks for {layers} layers, and the files of {plan.source} hold {len(stored)} tensors."
        )
    numbers, buffer_bytes = _sizes(config)
    found, stored_bytes = (sum(getattr(one, name) for one in stored) for name in ("num_elements", "num_bytes"))
    is_quantized = hasattr(config, "quantization_config")
    if numbers > found * (_PACKED if is_quantized else _MOST_TIMES):
        raise ModelError(
            f"{place} asks for weights of {format_bytes(numbers * dtype.itemsize)}, and the files of "
            f"{plan.source} hold {format_bytes(stored_bytes)}."
        )
    if plan.device_map is None:
        needed = stored_bytes if is_quantized else numbers * dtype.itemsize
        check_room(f"The weights of {plan.source}", needed + buffer_bytes, plan.device)


def _stored(plan: LoadPlan) -> list[StoredTensor]:
    """The tensors in a model's files, which are downloaded if they have to be."""
    folder = model_folder(plan.source, plan.revision, ["config.json", *WEIGHT_FILES])
    return [tensor for path in weight_files(folder) for tensor in stored_tensors(path).values()]


def _sizes(config: Any) -> tuple[int, int]:
    """Numbers of all parameters, and bytes of all buffers, of the network of a config, which is made without memory.

    Both are 0 if it cannot be made so, and loading it says why.
    """
    from transformers import AutoModelForCausalLM

    try:
        with torch.device("meta"):
            network = AutoModelForCausalLM.from_config(deepcopy(config), trust_remote_code=False)
    except Exception:
        return 0, 0
    numbers = sum(parameter.numel() for parameter in parameters_once(network))
    return numbers, sum(buffer.numel() * buffer.element_size() for buffer in network.buffers())


def _unknown_name(error: Exception, config: Any) -> str:
    """A sentence about a name in a config of transformers, if it looked that up and did not find it; else ""."""
    if not isinstance(error, KeyError) or config is None:
        return ""
    settings: dict[str, Any] = config.get_text_config().to_dict()
    settings |= settings.get("rope_parameters") or {}
    keys = [key for key, value in settings.items() if isinstance(value, str) and error.args == (value,)]
    return f"transformers does not know the {keys[0]} {error}, which its config.json names." if keys else ""


def first_sentence(error: BaseException) -> str:
    """The first line of a library's error, and the second if that says what it is about, ended by a full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    line = shorten(" ".join(lines[:2]) if lines[0].endswith(":") else lines[0], _LONGEST_REASON)
    if isinstance(error, LookupError | TypeError | AttributeError):  # whose messages are not for users
        line = f"{type(error).__name__}: {line}"
    return line if line.endswith(".") else line + "."
