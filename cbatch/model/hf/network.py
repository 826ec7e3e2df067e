"""Makes the transformers network of a model, once it is known that its weights are in its files and fit into memory.

transformers makes weights that are not in the files at random, as large as the config says, and only then reports them.
"""

from __future__ import annotations

import io
import logging
import re
from collections.abc import Mapping
from contextlib import nullcontext, redirect_stderr
from functools import partial
from tempfile import gettempdir
from typing import Any

from cbatch.base.errors import CbatchError, ModelError, first_sentence
from cbatch.base.model_files import model_folder
from cbatch.model.config import UnsupportedConfig, read_model_config
from cbatch.model.config_classes import text_config
from cbatch.model.device_map import is_disk_full
from cbatch.model.formats.quantized import settings_of
from cbatch.model.hf.memory_check import auto_class, check_weights_fit
from cbatch.model.hf.placement import keep_rewritten_weights
from cbatch.model.load_plan import LoadPlan, choose_dtype
from cbatch.model.tensor_names import HEAD, has_causal_class, is_classifier
from cbatch.text.loading import silence_libraries

_log = logging.getLogger("cbatch")


def load_network(plan: LoadPlan) -> Any:
    """The transformers model, on its device and in its dtype, in evaluation mode; spread if the plan says so.

    Raises ModelError, with one sentence, for whatever transformers, the hub, safetensors or the device raise.
    """
    silence_libraries()
    from transformers import AutoConfig

    source, revision, device_map = plan.source, plan.revision, plan.device_map
    config: Any = None
    try:
        found = read_model_config(model_folder(source, revision))
        _check_kind(found, source)
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
        number = choose_dtype(plan.dtype, getattr(config.get_text_config(), "dtype", None), plan.device)
        check_weights_fit(plan, config, number)
        _check_quantization(settings_of(found), source)
        load = partial(
            auto_class(config).from_pretrained,
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
        is_causal = any(map(has_causal_class, config.architectures or ()))
        lacks_head = set(report["missing_keys"]) == {HEAD} and not is_causal
        network.only_embeds = lacks_head or is_classifier(config.architectures)
        if (not report["missing_keys"] or lacks_head) and not report["mismatched_keys"]:
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
    for name, shape, wanted in sorted(report["mismatched_keys"]):
        raise ModelError(
            f"Cannot load {source}: {name} is {list(shape)} in its files, and {list(wanted)} by its config.json."
        )
    missing = sorted(report["missing_keys"])
    raise ModelError(f"Cannot load {source}: {len(missing)} of its weights are not in its files, such as {missing[0]}.")


def _check_quantization(settings: Any, source: str) -> None:
    """Raises ModelError for quantized weights that transformers would take for numbers."""
    from transformers.quantizers import AutoHfQuantizer

    method = settings.get("quant_method") if isinstance(settings, dict) else None
    if settings is not None and not (method and AutoHfQuantizer.supports_quant_method(settings)):
        raise ModelError(f"Cannot load {source}: transformers does not read weights of quant_method {method}.")


def _check_kind(config: Mapping[str, Any], source: str) -> None:
    """Raises ModelError for a type that transformers does not have, and says which version its files name."""
    from transformers import CONFIG_MAPPING, __version__

    try:
        text_config(config)
    except UnsupportedConfig as error:
        _log.warning("transformers reads %s otherwise than it is meant: %s.", source, error)
    kind, named = config.get("model_type"), str(config.get("transformers_version", ""))
    if kind is None or kind in CONFIG_MAPPING:
        return
    why = "It needs code of its authors, which is not run."
    if _numbers(named) > _numbers(__version__):
        why = f"Its config.json is of version {named}: install that, or a newer one."
    raise ModelError(f"Cannot load {source}: transformers {__version__} has no model type {kind!r}. {why}")


def _numbers(version: str) -> list[int]:
    return [int(part) for part in re.findall(r"\d+", version)[:3]]


def _unknown_name(error: Exception, config: Any) -> str:
    """A sentence about a name in a config of transformers, if it looked that up and did not find it; else ""."""
    if not isinstance(error, KeyError) or config is None:
        return ""
    settings: dict[str, Any] = config.get_text_config().to_dict()
    settings |= settings.get("rope_parameters") or {}
    keys = [key for key, value in settings.items() if isinstance(value, str) and error.args == (value,)]
    return f"transformers does not know the {keys[0]} {error}, which its config.json names." if keys else ""
