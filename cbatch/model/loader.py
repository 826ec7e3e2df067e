"""Finds a model and loads its weights and tokenizer; if that fails, says why in one sentence.

The fast path is loaded straight from config.json and safetensors, without transformers.
"""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateSyntaxError
from safetensors import SafetensorError

from cbatch.base.errors import (
    CbatchError,
    ConfigError,
    EngineError,
    ModelError,
    ModelNotFound,
    RequestError,
    first_sentence,
    in_short,
)
from cbatch.base.hub import gguf_paths, is_gguf, is_mmproj, looks_like_path, mmproj_paths, reachable_source
from cbatch.base.model_files import (
    MODELOPT_FILE,
    WEIGHT_FILES,
    WEIGHTS_INDEX,
    InvalidFile,
    check_files,
    check_source,
    model_folder,
    open_regular,
    read_header,
    read_json_object,
    sample_pieces,
    tensors_of_header,
    weight_files,
)
from cbatch.base.params import SamplingParams
from cbatch.media.pictures import NO_IMAGES
from cbatch.model.base import Model
from cbatch.model.config import UnsupportedConfig, read_generation_config, read_model_config
from cbatch.model.config_classes import class_of, levels, text_config
from cbatch.model.families import read_program
from cbatch.model.formats.gguf import GgufModel, fingerprint_of
from cbatch.model.formats.quantized import QuantizedCheckpoint, settings_of, without_quantization
from cbatch.model.hf.gguf_vision import vision_beside
from cbatch.model.hf.memory_check import fits
from cbatch.model.hf.network import load_network
from cbatch.model.hf.placement import Placement, placement_of
from cbatch.model.hf.vision import Vision, vision_of
from cbatch.model.load_plan import CALIBRATION_TEXT, DEMO_MODEL, LoadPlan, choose_dtype
from cbatch.model.lora.sites import sites_of
from cbatch.model.lora_files import Adapter
from cbatch.model.ops.program import Program
from cbatch.model.pooling import FILES, Pooling, default_mode, read_classifier, read_pooling
from cbatch.model.tensor_files import Tensors
from cbatch.model.tensor_names import has_own_head, is_classifier, lacks_head
from cbatch.runtime.device import is_accelerator
from cbatch.runtime.memory import is_out_of_memory
from cbatch.text.backend import TextTokenizer
from cbatch.text.chat_template import template_environment
from cbatch.text.isolated import load_tokenizer
from cbatch.text.tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from cbatch.model.cpu import CpuModel
    from cbatch.model.cuda import CudaModel

NOT_APPLIED = {
    "suppress_tokens": [], "begin_suppress_tokens": [], "bad_words_ids": [], "sequence_bias": {}, "min_length": 0,
    "forced_bos_token_id": None, "no_repeat_ngram_size": 0, "typical_p": 1.0, "num_beams": 1,
}  # fmt: skip
"""Keys of generation_config.json that would change the output but are not supported, and their neutral values."""

GGUF_NOT_APPLIED = "mirostat", "xtc_probability"
"""The same of a GGUF file's `general.sampling` keys, whose neutral values are 0."""

_log = logging.getLogger("cbatch")


@dataclass(frozen=True)
class LoadedModel:
    """A causal language model, and what its folder says about using it.

    make_network: makes the transformers model, on its device and in its dtype, in evaluation mode
    tokenizer:  None if the folder has none; such a model takes and gives token ids only
    defaults:   sampling parameters of generation_config.json; greedy by default
    sampling:   parameters of a GGUF file, by which only chats sample: it does not say whether to
    eos_ids:    tokens that end an output
    max_tokens: the limit of an output in generation_config.json, if there is one
    not_applied: keys of its files that are not supported and would change the output
    fingerprint: hash of the model's files (see `fingerprint`); empty for a model made in memory
    parts:      hashes of some of these files, by what they hold
    fast_model: the model on the fast path, if it has one; then the transformers model is made on demand
    placement:  what lies where, if the model is spread over devices
    path:       `fast`, or `transformers` and why
    stored:     formats of the weights in the file, if these are not the usual ones
    classifier: the classification head, if it has one
    vision:     its processor of images and vision tower, or why it takes no images
    make_pooling: reads how hidden states become an embedding
    """

    name: str
    make_network: Callable[[], Any] = field(repr=False)
    tokenizer: ChatTokenizer | None = field(repr=False)
    defaults: SamplingParams
    eos_ids: frozenset[int]
    sampling: dict[str, Any] = field(default_factory=dict)
    max_tokens: int | None = None
    not_applied: tuple[str, ...] = ()
    fingerprint: str = ""
    parts: Mapping[str, str] = field(default_factory=dict, repr=False)
    fast_model: Model | None = field(default=None, repr=False)
    placement: Placement | None = None
    path: str = ""
    stored: str = ""
    classifier: Pooling | None = field(default=None, repr=False)
    vision: Vision | str = field(default=NO_IMAGES, repr=False)
    make_pooling: Callable[[], Pooling] = field(default=Pooling, repr=False)

    @cached_property
    def network(self) -> Any:
        return self.make_network()

    @cached_property
    def pooling(self) -> Pooling:
        """How hidden states become an embedding. Raises ModelError if its files say it in a way that is not known."""
        return self.classifier or self.make_pooling()

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
    name = "the bundled demo model" if plan.source == str(DEMO_MODEL) else plan.source
    device_map = plan.device_map
    check_folder(plan.source)
    plan = replace(plan, source=reachable_source(plan.source, plan.revision))
    folder, config, settings, defaults = _checked_settings(plan)
    is_calibrated = plan.quantize is not None and plan.quantize.tries_4_bits
    found = load_tokenizer(plan.source, plan.revision) if is_calibrated or not plan.part.rank else None
    tokenizer = _checked_tokenizer(plan, None if plan.part.rank else found)
    if is_calibrated:
        plan = replace(plan, ids=calibration_ids(found))
    if device_map is not None:
        plan = replace(plan, device=device_map.device, device_map=None if fits(plan, device_map) else device_map)
    make_network: Callable[[], Any] = partial(load_network, plan)
    fast_model, placement, path = None, None, "transformers"
    if plan.fast and plan.device_map is None:
        try:
            fast_model, path = load_fast_model(plan), "fast"
        except NoFastPath as error:
            if plan.part.size > 1:
                raise ConfigError(f"{name} cannot be split over processes (--tensor-parallel): {error}.") from error
            path = f"transformers: {error}"
            if not is_accelerator(plan.device) and settings_of(config) is not None:
                make_network = partial(_or_say, make_network, str(error))
    if fast_model is not None:
        vocab_size, default = fast_model.vocab_size, class_of(fast_model.kind)
        default_end, dtype = None if default is None else default.ends, fast_model.dtype
    else:
        network = make_network()
        text = network.config.get_text_config()
        make_network, vocab_size, default_end = lambda: network, text.vocab_size, text.eos_token_id
        dtype = network.dtype
        if plan.device_map is not None:
            placement = placement_of(network)
            _log.warning("%s", f"The model is spread: {placement}. {placement.cost}".strip())
    ends = end_ids(vocab_size, config, settings, tokenizer=tokenizer, default=default_end)
    parts, classifier = fingerprints(folder), None
    if is_classifier(config.get("architectures")):
        classifier = read_classifier(model_folder(plan.source, plan.revision, ["config.json", *WEIGHT_FILES]), config)
    return LoadedModel(
        name=name,
        make_network=make_network,
        tokenizer=tokenizer,
        defaults=defaults,
        eos_ids=ends,
        max_tokens=settings.get("max_new_tokens"),
        not_applied=tuple(key for key in NOT_APPLIED if settings.get(key) not in (None, NOT_APPLIED[key])),
        fingerprint=parts["all"],
        parts=parts,
        fast_model=fast_model,
        placement=placement,
        path=path,
        stored=getattr(fast_model, "stored", ""),
        classifier=classifier,
        vision=vision_of(plan.source, plan.revision, plan.device, choose_dtype("auto", dtype, plan.device)),  # by torch
        make_pooling=lambda: read_pooling(model_folder(plan.source, plan.revision, FILES), tokenizer),
    )


def _checked_tokenizer(plan: LoadPlan, tokenizer: TextTokenizer | None) -> ChatTokenizer | None:
    if tokenizer is not None and plan.chat_template is not None:
        try:
            template_environment().parse(plan.chat_template)
        except TemplateSyntaxError as error:
            raise ConfigError(f"The chat template is no Jinja template: line {error.lineno}: {error}.") from error
        tokenizer = replace(tokenizer, chat_template=plan.chat_template)
    made = ChatTokenizer(tokenizer, plan.reply_format) if tokenizer is not None else None
    if made is not None:
        made.try_template()
    return made


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
    checkpoint = GgufModel(paths, plan.weight_cache)
    tokenizer = _checked_tokenizer(plan, checkpoint.tokenizer)
    model = checkpoint.load(plan)
    of_images = choose_dtype("auto", model.dtype, plan.device)  # by torch
    vision = vision_beside(mmproj_paths(source, paths[0]), checkpoint, plan.device, of_images)
    fingerprint = checkpoint.fingerprint
    if not isinstance(vision, str):
        fingerprint = fingerprint_of(vision.file, fingerprint)

    def make_network() -> Any:
        raise EngineError(f"{source} is a GGUF file, which transformers does not load here.")

    return LoadedModel(
        name=source,
        make_network=make_network,
        tokenizer=tokenizer,
        defaults=SamplingParams(),
        eos_ids=end_ids(model.vocab_size, checkpoint.config, tokenizer=tokenizer),
        sampling=_sampling_in(checkpoint.sampling, source, temperature="temp", repetition_penalty="penalty_repeat"),
        not_applied=tuple(key for key in GGUF_NOT_APPLIED if checkpoint.sampling.get(key)),
        fingerprint=fingerprint,
        fast_model=model,
        path="fast",
        stored=checkpoint.description,
        vision=vision,
        make_pooling=lambda: Pooling(checkpoint.pooling or default_mode(tokenizer)),
    )


def _checked_settings(plan: LoadPlan) -> tuple[Path, dict[str, Any], dict[str, Any], SamplingParams]:
    """The folder of a model, its config.json and generation_config.json, and the sampling parameters of the latter.

    Raises ModelError if the hub cannot be reached, and for settings of the model that cannot be true.
    """
    try:
        folder = model_folder(plan.source, plan.revision, ["config.json", MODELOPT_FILE, "generation_config.json"])
    except OSError as error:
        raise ModelError(f"Cannot load {plan.source}: {first_sentence(error)}") from error
    config, settings = read_model_config(folder), read_generation_config(folder)
    temperature = settings.get("temperature", 1.0) if settings.get("do_sample") else None
    chosen = _sampling_in(
        {**settings, "temperature": temperature}, f"the generation_config.json of {plan.source}",
        min_tokens="min_new_tokens", stop="stop_strings", max_tokens="max_new_tokens",
    )  # fmt: skip
    return folder, config, settings, SamplingParams().merged(chosen)


def _or_say(make_network: Callable[[], Any], reason: str) -> Any:
    """A network whose quantized weights only transformers may read. reason: why they are not read here"""
    try:
        return make_network()
    except ModelError as error:
        if reason.rstrip(".") in str(error):
            raise
        raise ModelError(f"{str(error).removesuffix('.')}; and without transformers {reason.rstrip('.')}.") from error


def check_folder(source: str) -> None:
    """Raises ModelError for a path at which there is no folder of a model."""
    folder = Path(source)
    if folder.is_dir():
        check_files(folder)
        if not (folder / "config.json").is_file() and (
            files := sorted(folder.glob("*.gguf"), key=lambda path: (is_mmproj(path.name), path))
        ):
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


def _sampling_in(settings: Mapping[str, Any], source: str, **renamed: str) -> dict[str, Any]:
    """The sampling parameters that settings of a model mean. Raises ModelError for values that cannot be.

    Only keys that stand in the file count; transformers' own defaults (top_k 50) do not.

    renamed: the keys of parameters that have another name there
    """
    names = {key: key for key in ("top_k", "top_p", "min_p", "temperature", "repetition_penalty")} | renamed
    chosen = {ours: settings[theirs] for ours, theirs in names.items() if settings.get(theirs) is not None}
    try:
        SamplingParams().merged(chosen)
    except RequestError as error:
        raise ModelError(f"The sampling settings of {source} are wrong: {error}") from error
    return chosen


def end_ids(
    vocab_size: int, *files: Mapping[str, Any], tokenizer: ChatTokenizer | None, default: Any = None
) -> frozenset[int]:
    """The end tokens that any of the files or the tokenizer names, at any level, if they can be tokens.

    default: of the class of the config, which counts if nobody names one
    """
    given = [level.get("eos_token_id") for file in files for level in levels(file)]
    if tokenizer is not None:
        given.append(tokenizer.eos_id)
    named = [one for one in given if one is not None] or [default or []]
    ids = (token for one in named for token in ([one] if isinstance(one, int) else one))
    return frozenset(token for token in ids if 0 <= token < vocab_size)


class NoFastPath(Exception):
    """Why transformers has to load a model."""


def load_fast_model(plan: LoadPlan) -> CpuModel | CudaModel:
    """The model on the fast path.

    Raises NoFastPath if it has none, or if anything about its files is unusual: then transformers loads it, or says
    what is wrong. Raises ModelError if there is not enough memory, because transformers would need as much, and
    if quantized weights are damaged.
    """
    try:
        return _load_fast(plan)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        reason = str(error).partition(". ")[0].rstrip(".")
    except (UnsupportedConfig, InvalidFile, ImportError, OSError, SafetensorError) as error:
        if plan.quantize is not None:
            raise ConfigError(f"{plan.source} cannot be quantized to {plan.quantize.weights}: {error}.") from error
        _log.info("%s does not use the fast path: %s.", plan.source, error)
        raise NoFastPath(str(error)) from error
    # Raised here, where the weights that were loaded have been freed.
    raise ModelError(f"Cannot load {plan.source}: its weights do not fit into the memory of {plan.device} ({reason}).")


def check_adapters(adapters: Sequence[Adapter], plan: LoadPlan) -> None:
    """Raises ModelError for an adapter that does not fit the model in a folder, or of a hub id, by its config.json.

    Adapters of GGUF files, and of models without a fast path, are only checked once these are loaded.
    """
    check_source(plan.source)
    if is_gguf(plan.source):
        return
    try:
        config = read_model_config(model_folder(reachable_source(plan.source, plan.revision), plan.revision))
        program = read_program(without_quantization(config) if settings_of(config) is not None else config)
    except (OSError, UnsupportedConfig):
        return
    sites_of(program, adapters)


def _load_fast(plan: LoadPlan) -> CpuModel | CudaModel:
    config = read_model_config(model_folder(plan.source, plan.revision))
    checkpoint = None
    if settings_of(config) is not None:
        checkpoint, config = QuantizedCheckpoint(config), without_quantization(config)
    read_program(config)  # before weights are downloaded
    folder = model_folder(plan.source, plan.revision, ["config.json", "generation_config.json", *WEIGHT_FILES])
    tensors, files, identity = Tensors(folder), weight_files(folder), partial(fingerprint, folder)
    config, program, only_embeds = with_head(config, tensors)
    if checkpoint is None:
        dtype, quantize = plan.formats(config.get("dtype", config.get("torch_dtype")), is_quantized=False)
        model = plan.fast_model(config, tensors, dtype, quantize, files, identity)
    else:  # on a GPU, and in bfloat16 on a CPU, matrices keep the integers of the files; else they become numbers
        dtype, quantize = plan.formats("bfloat16", is_quantized=True)
        weights = checkpoint.weights(program, tensors)
        model = plan.fast_model(config, weights, dtype, quantize, files, identity)
        weights.finish(checkpoint.name, "the files", model, quantize)
    if only_embeds:
        model.generates = False
    return model


def with_head(config: dict[str, Any], tensors: Tensors) -> tuple[dict[str, Any], Program, bool]:
    """A config and its program, whose head is the embedding if the files hold no other; and whether they hold none."""
    program = read_program(config)
    is_missing = lacks_head(program, tensors)
    if is_missing or has_own_head(program, tensors):
        config = {**text_config(config), "tie_word_embeddings": is_missing}
        program = read_program(config)
    return config, program, is_missing


def calibration_ids(tokenizer: TextTokenizer | None) -> tuple[int, ...]:
    """The tokens of `CALIBRATION_TEXT`; none without a tokenizer."""
    return () if tokenizer is None else tuple(tokenizer.backend.encode(CALIBRATION_TEXT.read_text("utf-8")).ids)


NAMES_AND_VERSIONS = ("_name_or_path", "name_or_path", "transformers_version", "tokenizer_file")
"""Keys of a model's JSON files that say where it came from, not what it is."""

TOKENIZER_FILES = ("tokenizer.json", "added_tokens.json", "vocab*", "merges.txt", "*.model")


def fingerprint(folder: Path) -> str:
    """A hash of the model in a folder, 32 hexadecimal digits (see `fingerprints`)."""
    return fingerprints(folder)["all"]


def fingerprints(folder: Path) -> dict[str, str]:
    """Hashes of the model in a folder, 32 hexadecimal digits: of all of it, and of its parts.

    Only a few bytes of each tensor are read, at even distances, so that large models take no longer. Names, paths and
    times do not count. Raises ModelError for weights that are not safetensors files.
    """
    digests: dict[str, hashlib.blake2b] = {}

    def update(part: str, data: bytes) -> None:
        for name in ("all", part):
            digests.setdefault(name, hashlib.blake2b(digest_size=16)).update(data)

    for name in ("config.json", "tokenizer_config.json", "special_tokens_map.json"):
        settings = read_json_object(folder / name)
        kept = {key: value for key, value in settings.items() if key not in NAMES_AND_VERSIONS}
        update("config.json" if name == "config.json" else "tokenizer", json.dumps(kept, sort_keys=True).encode())
    for path in sorted(path for pattern in TOKENIZER_FILES for path in folder.glob(pattern) if path.is_file()):
        with open_regular(path) as opened:
            update("tokenizer", hashlib.file_digest(opened, hashlib.blake2b).digest())
    for path in weight_files(folder) or sorted(folder.glob("*.safetensors")):
        for sample in _samples(path):
            update("weights", sample)
    return {part: digest.hexdigest() for part, digest in digests.items()}


def _samples(path: Path) -> Iterator[bytes]:
    """The header of a safetensors file (https://huggingface.co/docs/safetensors), then a few bytes of each tensor."""
    with open_regular(path) as file:
        header = read_header(file, path)
        yield header
        for tensor in tensors_of_header(header, path).values():
            for start, stop in sample_pieces(tensor.num_bytes):
                file.seek(tensor.start + start)
                yield file.read(stop - start)
