"""Finds a model and loads its weights and tokenizer; if that fails, says why in one sentence."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from cbatch.base.errors import (
    CbatchError,
    ConfigError,
    EngineError,
    ModelError,
    ModelNotFound,
    RequestError,
    in_short,
)
from cbatch.base.hub import gguf_paths, is_gguf, looks_like_path, reachable_source
from cbatch.base.model_files import WEIGHTS_INDEX, check_files, check_source, model_folder, weight_files
from cbatch.base.params import SamplingParams
from cbatch.model.base import Model
from cbatch.model.checkpoint import NoFastPath, load_fast_model
from cbatch.model.config import read_generation_config, read_model_config
from cbatch.model.fingerprint import fingerprint
from cbatch.model.formats.gguf import GgufModel
from cbatch.model.formats.quantized import settings_of
from cbatch.model.hf.network import first_sentence, fits, load_network
from cbatch.model.hf.placement import Placement, placement_of
from cbatch.model.load_plan import LoadPlan
from cbatch.runtime.device import is_accelerator
from cbatch.text.isolated import load_tokenizer
from cbatch.text.template_renderer import template_check
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

_log = logging.getLogger("cbatch")


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


def load_model(plan: LoadPlan) -> LoadedModel:
    """Loads a causal language model.

    Only safetensors and GGUF files are read, and no code that comes with a model is run.
    Raises ModelError, with one sentence, if that fails, whatever its files make libraries raise.
    """
    check_source(plan.source)
    try:
        return _load_gguf(plan) if is_gguf(plan.source) else _load(plan)
    except CbatchError:
        raise
    except Exception as error:
        raise ModelError(f"Cannot load {plan.source}: {in_short(error)}.") from error


def _load(plan: LoadPlan) -> LoadedModel:
    name, device_map = plan.name, plan.device_map
    _check_folder(plan.source)
    plan = replace(plan, source=reachable_source(plan.source, plan.revision))
    folder, settings, defaults = _checked_settings(plan)
    text_tokenizer = load_tokenizer(plan.source, plan.revision)
    tokenizer = ChatTokenizer(text_tokenizer) if text_tokenizer else None
    if device_map is not None:
        plan = replace(plan, device=device_map.device, device_map=None if fits(plan, device_map) else device_map)
    make_network: Callable[[], Any] = partial(load_network, plan)
    fast_model, placement, path = None, None, "transformers"
    with template_check(tokenizer.chat_template if tokenizer else None):
        if plan.fast and plan.device_map is None:
            try:
                fast_model, path = load_fast_model(plan), "fast"
            except NoFastPath as error:
                path = f"transformers: {error}"
                if not is_accelerator(plan.device) and settings_of(read_model_config(folder)) is not None:
                    make_network = partial(_or_say, make_network, str(error))
        if fast_model is not None:
            config = fast_model.config
        else:
            network = make_network()
            make_network, config = lambda: network, network.config.get_text_config().to_dict()
            if plan.device_map is not None:
                placement = placement_of(network)
                _log.warning("%s", f"The model is spread: {placement}. {placement.cost}".strip())
    return LoadedModel(
        name=name,
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


def _load_gguf(plan: LoadPlan) -> LoadedModel:
    source = plan.source
    if not plan.fast or plan.device_map is not None:
        raise ConfigError(
            f"{source} is a GGUF file, which only the fast path of a CPU or an NVIDIA GPU runs: use --attention "
            "auto, blocks of a multiple of 16 tokens, and no --device-map; --device cpu runs it on any machine."
        )
    try:
        paths = gguf_paths(reachable_source(source, plan.revision), plan.revision)
    except OSError as error:
        raise ModelError(f"Cannot load {source}: {first_sentence(error)}") from error
    checkpoint = GgufModel(paths)
    with template_check(checkpoint.chat_template):
        tokenizer = ChatTokenizer(checkpoint.tokenizer) if checkpoint.tokenizer else None
        model = checkpoint.load(plan)

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


def _checked_settings(plan: LoadPlan) -> tuple[Path, dict[str, Any], SamplingParams]:
    """The folder of a model's files, its generation_config.json, and the sampling parameters that this asks for.

    Raises ModelError if the hub cannot be reached, and for settings of the model that cannot be true.
    """
    try:
        folder = model_folder(plan.source, plan.revision, ["config.json", "generation_config.json"])
    except OSError as error:
        raise ModelError(f"Cannot load {plan.source}: {first_sentence(error)}") from error
    read_model_config(folder)
    settings = read_generation_config(folder)
    try:
        return folder, settings, _sampling_defaults(settings)
    except RequestError as error:
        raise ModelError(f"The generation_config.json of {plan.source} is wrong: {error}") from error


def _or_say(make_network: Callable[[], Any], reason: str) -> Any:
    """A network whose quantized weights only transformers may read. reason: why they are not read here"""
    try:
        return make_network()
    except ModelError as error:
        if reason.rstrip(".") in str(error):
            raise
        raise ModelError(f"{str(error).removesuffix('.')}; and without transformers {reason.rstrip('.')}.") from error


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
