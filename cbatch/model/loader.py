"""Finds a model and loads its weights and tokenizer; if that fails, says why in one sentence."""

from __future__ import annotations

import io
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext, redirect_stderr
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from tempfile import gettempdir
from textwrap import shorten
from typing import Any

import torch

from cbatch.base.errors import (
    CbatchError,
    ConfigError,
    EngineError,
    ModelError,
    ModelNotFound,
    RequestError,
    in_short,
)
from cbatch.base.gguf_source import gguf_paths, is_gguf
from cbatch.base.hub import looks_like_path, reachable_source
from cbatch.base.model_files import WEIGHTS_INDEX, check_files, check_source, model_folder, weight_files
from cbatch.base.params import SamplingParams
from cbatch.base.quantization import Quantization
from cbatch.base.units import format_bytes
from cbatch.model.base import Model
from cbatch.model.checkpoint import NoFastPath, load_fast_model
from cbatch.model.config import read_generation_config, read_model_config
from cbatch.model.dtypes import choose_dtype
from cbatch.model.fingerprint import fingerprint
from cbatch.model.formats.gguf import GgufModel
from cbatch.model.formats.quantized import settings_of
from cbatch.model.hf.device_map import DeviceMap, is_disk_full, weights_size
from cbatch.model.hf.hooks import keep_rewritten_weights
from cbatch.model.hf.placement import Placement, placement_of
from cbatch.model.hf.weights_fit import check_weights_fit
from cbatch.model.weight_cache import WeightCache
from cbatch.runtime.device import is_accelerator
from cbatch.text.loading import load_tokenizer
from cbatch.text.template_sandbox import template_check
from cbatch.text.tokenizer import ChatTokenizer

NOT_APPLIED = {
    "suppress_tokens": [],
    "begin_suppress_tokens": [],
    "bad_words_ids": [],
    "sequence_bias": {},
    "min_length": 0,
    "forced_bos_token_id": None,
    "no_repeat_ngram_size": 0,
    "typical_p": 1.0,
    "num_beams": 1,
}
"""Keys of generation_config.json that would change the output but are not supported, and their neutral values."""

_LONGEST_REASON = 300
"""Characters of a library's error."""

_log = logging.getLogger("cbatch")

DEMO_MODEL = Path(__file__).parents[1] / "demo"


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model, and what its folder says about using it.

    make_network: makes the transformers model, on its device and in its dtype, in evaluation mode
    tokenizer:  None if the folder has none; such a model takes and gives token ids only
    defaults:   sampling parameters of generation_config.json; greedy by default
    eos_ids:    tokens that end an output
    max_tokens: the limit of an output in generation_config.json, if there is one
    not_applied: keys of generation_config.json that are not supported and would change the output
    fingerprint: hash of the model's files (see `fingerprint`); empty for a model made in memory
    fast_model: the model on the fast path, if it has one; then the transformers model is made on demand
    placement:  what lies where, if the model is spread over devices
    path:       `fast`, or `transformers` and why
    stored:     formats of the weights in the file, if these are not the usual ones
    """

    name: str
    make_network: Callable[[], Any]
    tokenizer: ChatTokenizer | None
    defaults: SamplingParams
    eos_ids: frozenset[int]
    max_tokens: int | None = None
    not_applied: tuple[str, ...] = ()
    fingerprint: str = ""
    fast_model: Model | None = None
    placement: Placement | None = None
    path: str = ""
    stored: str = ""

    @cached_property
    def network(self) -> Any:
        return self.make_network()

    def without_weights(self) -> LoadedModel:
        """The same without its weights, for an engine that is closed."""

        def make_network() -> Any:
            raise EngineError("The engine is closed, and its model is no longer in memory.")

        return replace(self, make_network=make_network, fast_model=None)


def load_model(
    name: str | None,
    revision: str | None,
    device: torch.device,
    dtype: str,
    *,
    fast: bool = False,
    quantize: Quantization | None = None,
    activations: str = "int8",
    weight_cache: WeightCache | None = None,
    device_map: DeviceMap | None = None,
) -> LoadedModel:
    """Loads a causal language model from a folder, a GGUF file or the hub; None is the bundled demo model.

    fast:           take the fast path if the model has one
    quantize:       keep the matrices of the fast path as integers
    activations:    how rows are rounded that are multiplied with quantized weights which the file has (see
                    `Quantization`)
    weight_cache:   where packed weights are kept; for the fast path on a CPU
    device_map:     spread the model if it does not fit on its device

    Only safetensors and GGUF files are read, and no code that comes with a model is run.
    Raises ModelError, with one sentence, if that fails, whatever its files make libraries raise.
    """
    source = str(DEMO_MODEL) if name is None else name
    check_source(source)
    try:
        return _load(name, source, revision, device, dtype, fast, quantize, activations, weight_cache, device_map)
    except CbatchError:
        raise
    except Exception as error:
        raise ModelError(f"Cannot load {source}: {in_short(error)}.") from error


def _load(
    name: str | None,
    source: str,
    revision: str | None,
    device: torch.device,
    dtype: str,
    fast: bool,
    quantize: Quantization | None,
    activations: str,
    weight_cache: WeightCache | None,
    device_map: DeviceMap | None,
) -> LoadedModel:
    if is_gguf(source):
        if not fast or device_map is not None:
            raise ConfigError(
                f"{source} is a GGUF file, which only the fast path of a CPU or an NVIDIA GPU runs: use --attention "
                "auto, blocks of a multiple of 16 tokens, and no --device-map; --device cpu runs it on any machine."
            )
        return _load_gguf(source, revision, device, dtype, quantize, activations, weight_cache)
    _check_folder(source)
    source = reachable_source(source, revision)
    folder, settings, defaults = _checked_settings(source, revision)
    text_tokenizer = load_tokenizer(source, revision)
    tokenizer = ChatTokenizer(text_tokenizer) if text_tokenizer else None
    template = tokenizer.chat_template if tokenizer else None
    if device_map is not None:
        device = device_map.device
        if _fits(source, revision, device_map, dtype):
            device_map = None
    make_network: Callable[[], Any] = partial(_load_network, source, revision, device, dtype, device_map)
    fast_model, placement, path = None, None, "transformers"
    with template_check(template):
        if fast and device_map is None:
            try:
                fast_model, path = (
                    load_fast_model(
                        source,
                        revision,
                        device,
                        dtype,
                        quantize=quantize,
                        activations=activations,
                        weight_cache=weight_cache,
                    ),
                    "fast",
                )
            except NoFastPath as error:
                path = f"transformers: {error}"
                if _is_quantized(source, revision) and not is_accelerator(device):
                    make_network = partial(_or_say, make_network, str(error))
        if fast_model is not None:
            config = fast_model.config
        else:
            network = make_network()
            make_network, config = lambda: network, network.config.get_text_config().to_dict()
            placement = _place(network) if device_map is not None else None
    return LoadedModel(
        name="the bundled demo model" if name is None else name,
        make_network=make_network,
        tokenizer=tokenizer,
        defaults=defaults,
        eos_ids=_eos_ids(settings, config),
        max_tokens=settings.get("max_new_tokens"),
        not_applied=tuple(key for key in NOT_APPLIED if settings.get(key) not in (None, NOT_APPLIED[key])),
        fingerprint=fingerprint(folder),
        fast_model=fast_model,
        placement=placement,
        path=path,
        stored=getattr(fast_model, "stored", ""),
    )


def _load_gguf(
    source: str,
    revision: str | None,
    device: torch.device,
    dtype: str,
    quantize: Quantization | None,
    activations: str,
    weight_cache: WeightCache | None,
) -> LoadedModel:
    try:
        paths = gguf_paths(reachable_source(source, revision), revision)
    except OSError as error:
        raise ModelError(f"Cannot load {source}: {_first_sentence(error)}") from error
    checkpoint = GgufModel(paths)
    template = checkpoint.chat_template
    with template_check(template):
        tokenizer = ChatTokenizer(checkpoint.tokenizer) if checkpoint.tokenizer else None
        model = checkpoint.load(device, dtype, quantize=quantize, activations=activations, weight_cache=weight_cache)

    def make_network() -> Any:
        raise EngineError(f"{source} is a GGUF file, which transformers does not load here.")

    return LoadedModel(
        name=source,
        make_network=make_network,
        tokenizer=tokenizer,
        defaults=SamplingParams(),
        eos_ids=_eos_ids({}, checkpoint.config),
        fingerprint=checkpoint.fingerprint,
        fast_model=model,
        path="fast",
        stored=checkpoint.description,
    )


def _fits(source: str, revision: str | None, device_map: DeviceMap, dtype: str) -> bool:
    """Whether a model need not be spread, which is said then. Raises ModelError if its files cannot be had."""
    device, room = device_map.device, device_map.limits[str(device_map.device)]
    try:
        size = weights_size(source, revision, dtype, device)
    except OSError as error:
        raise ModelError(f"Cannot load {source}: {_first_sentence(error)}") from error
    if not 0 < size <= room:
        return False
    _log.warning(
        "The model is not spread: its weights (%s) fit on %s, where they may take %s. --device-map is not needed.",
        format_bytes(size), device, format_bytes(room),
    )  # fmt: skip
    return True


def _place(network: Any) -> Placement:
    placement = placement_of(network)
    _log.warning("%s", f"The model is spread: {placement}. {placement.cost}".strip())
    return placement


def _checked_settings(source: str, revision: str | None) -> tuple[Path, dict[str, Any], SamplingParams]:
    """The folder of a model's files, its generation_config.json, and the sampling parameters that this asks for.

    Raises ModelError if the hub cannot be reached, and for settings of the model that cannot be true.
    """
    try:
        folder = model_folder(source, revision, ["config.json", "generation_config.json"])
    except OSError as error:
        raise ModelError(f"Cannot load {source}: {_first_sentence(error)}") from error
    read_model_config(folder)
    settings = read_generation_config(folder)
    try:
        return folder, settings, _sampling_defaults(settings)
    except RequestError as error:
        raise ModelError(f"The generation_config.json of {source} is wrong: {error}") from error


def _load_network(
    source: str, revision: str | None, device: torch.device, dtype: str, device_map: DeviceMap | None
) -> Any:
    _silence_libraries()
    from transformers import AutoConfig, AutoModelForCausalLM

    config: Any = None
    try:
        config = AutoConfig.from_pretrained(source, revision=revision, trust_remote_code=False)
        number = choose_dtype(dtype, getattr(config.get_text_config(), "dtype", None), device)
        check_weights_fit(source, revision, config, number, device if device_map is None else None)
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
        with _without_bars(config):
            network, report = load() if device_map is None else _load_spread(load, device_map)
        if not report["missing_keys"] and not report["mismatched_keys"]:
            return (network.to(device) if device_map is None else network).eval()
    except CbatchError:
        raise
    except Exception as error:  # transformers, the hub, safetensors, json and the device each raise their own kinds
        if device_map is not None and is_disk_full(error):
            raise ModelError(
                f"Cannot load {source}: the disk of {device_map.folder or gettempdir()} is full, where weights are "
                "rewritten that are to stay on disk; name a folder with more room by --offload-folder."
            ) from error
        raise ModelError(f"Cannot load {source}: {_unknown_name(error, config) or _first_sentence(error)}") from error
    for name, found, wanted in sorted(report["mismatched_keys"]):
        raise ModelError(
            f"Cannot load {source}: {name} is {list(found)} in its files, and {list(wanted)} by its config.json."
        )
    missing = sorted(report["missing_keys"])
    raise ModelError(f"Cannot load {source}: {len(missing)} of its weights are not in its files, such as {missing[0]}.")


def _load_spread(load: Callable[..., Any], device_map: DeviceMap) -> tuple[Any, dict[str, Any]]:
    """What transformers loads if accelerate decides where it goes."""
    with device_map.offload_folder() as folder:
        network, report = load(device_map="auto", max_memory=device_map.max_memory, offload_folder=str(folder))
        keep_rewritten_weights(network, folder)
    return network, report


def _is_quantized(source: str, revision: str | None) -> bool:
    try:
        return settings_of(read_model_config(model_folder(source, revision))) is not None
    except (OSError, ModelError):
        return False


def _or_say(make_network: Callable[[], Any], reason: str) -> Any:
    """A network whose quantized weights only transformers may read. reason: why they are not read here"""
    try:
        return make_network()
    except ModelError as error:
        if reason.rstrip(".") in str(error):
            raise
        raise ModelError(f"{str(error).removesuffix('.')}; and without transformers {reason.rstrip('.')}.") from error


def _silence_libraries() -> None:
    """Hides the warnings and progress bars of transformers, accelerate and the hub; their errors are still raised.

    Called just before they are used, because importing transformers takes long.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    for name in ("huggingface_hub", "accelerate"):
        logging.getLogger(name).setLevel(logging.ERROR)


def _without_bars(config: Any) -> AbstractContextManager[object]:
    """Hides the progress bars that libraries of quantized formats draw on stderr, terminal or not."""
    return redirect_stderr(io.StringIO()) if getattr(config, "quantization_config", None) else nullcontext()


def _check_folder(source: str) -> None:
    folder = Path(source)
    if folder.is_dir():
        check_files(folder)
        if not (folder / "config.json").is_file() and (files := sorted(folder.glob("*.gguf"))):
            raise ModelError(f"{source} holds GGUF files; name the one to load, such as {files[0]}.")
        if not (folder / "config.json").is_file():
            raise ModelError(f"{source} is not a model folder: it has no config.json.")
        if not any(folder.glob("*.safetensors")):
            raise ModelError(f"{source} holds no safetensors weights; other formats are not read.")
        missing = next((path for path in weight_files(folder) if not path.is_file()), None)
        if missing is not None:
            raise ModelError(f"There is no file {missing}, which {WEIGHTS_INDEX} names.")
    elif folder.exists():
        raise ModelError(f"{source} is a file; a model is a folder or a hub id such as Qwen/Qwen3-0.6B.")
    elif looks_like_path(source):
        raise ModelNotFound(f"There is no model folder {source}.")


def _sampling_defaults(settings: dict[str, Any]) -> SamplingParams:
    """Only keys that stand in the file count; transformers' own defaults (top_k 50) do not."""
    names = {key: key for key in ("top_k", "top_p", "min_p", "repetition_penalty")}
    names |= {"min_new_tokens": "min_tokens", "stop_strings": "stop", "max_new_tokens": "max_tokens"}
    chosen = {ours: settings[theirs] for theirs, ours in names.items() if settings.get(theirs) is not None}
    if settings.get("do_sample"):
        chosen["temperature"] = settings.get("temperature", 1.0)
    return SamplingParams().merged(chosen)


def _eos_ids(settings: Mapping[str, Any], config: Mapping[str, Any]) -> frozenset[int]:
    """End tokens of generation_config.json, else of the model's config; ids that cannot be tokens are left out."""
    given = settings.get("eos_token_id")
    if given is None:
        given = config.get("eos_token_id")
    ids = [given] if isinstance(given, int) else given or []
    return frozenset(token for token in ids if 0 <= token < config["vocab_size"])


def _unknown_name(error: Exception, config: Any) -> str:
    """A sentence about a name in a config of transformers, if it looked that up and did not find it; else ""."""
    if not isinstance(error, KeyError) or config is None:
        return ""
    settings: dict[str, Any] = config.get_text_config().to_dict()
    settings |= settings.get("rope_parameters") or {}
    keys = [key for key, value in settings.items() if isinstance(value, str) and error.args == (value,)]
    return f"transformers does not know the {keys[0]} {error}, which its config.json names." if keys else ""


def _first_sentence(error: BaseException) -> str:
    """The first line of a library's error, and the second if that says what it is about, ended by a full stop."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()] or [type(error).__name__]
    line = shorten(" ".join(lines[:2]) if lines[0].endswith(":") else lines[0], _LONGEST_REASON)
    if isinstance(error, LookupError | TypeError | AttributeError):  # whose messages are not for users
        line = f"{type(error).__name__}: {line}"
    return line if line.endswith(".") else line + "."
