"""Configuration of an engine."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, TypedDict

from cbatch.base.errors import ConfigError, os_errors_as
from cbatch.base.option import check_options, differing, documented, option, parse_json
from cbatch.base.units import parse_memory

DEVICE_VARIABLE = "CBATCH_DEVICE"
"""The environment variable that says what `auto` is."""

CPU_CACHE_SHARE = "25%"
"""The share of free memory that the KV cache takes by default, where the device works in the memory of the host."""

_REPLY_FORMATS = Path(__file__).parents[1] / "text" / "reply_formats"
REPLY_FORMATS = ("auto", *sorted(path.stem for path in _REPLY_FORMATS.glob("*.toml")))
"""The names of declarations of what models write."""

FLOAT_TYPES = ("auto", "float32", "bfloat16", "float16")


def _parse_target(text: str) -> float | str | None:
    if text in ("auto", "none"):
        return None if text == "none" else text
    try:
        milliseconds = float(text)
    except ValueError:
        milliseconds = math.nan
    if not 0 < milliseconds < math.inf:
        raise ValueError(f"{text!r} is no number of milliseconds above 0, nor auto or none.")
    return milliseconds


def parse_count(text: str, *words: str) -> int | str:
    """A number of at least 1, or one of the words. Raises ValueError with a sentence."""
    if text in words:
        return text
    if not (text.isascii() and text.isdecimal() and int(text) >= 1):
        raise ValueError(f"{text!r} is no number of at least 1, nor {' or '.join(words)}.")
    return int(text)


_model, _engine, _memory = (partial(option, group=group) for group in ("Model", "Engine", "Memory"))


@documented
@dataclass(frozen=True, slots=True, kw_only=True, repr=False)
class EngineConfig:
    """The model that an engine loads, and the part of the machine that it uses.

    Raises ConfigError for a value of another type, one out of range, and values that do not go together.
    """

    model: str | None = _model(
        None,
        "Model to load: hub id, folder, GGUF file or ID:FILE.gguf.",
        names=("-m", "--model"),
        metavar="ID_OR_DIR",
        is_file=True,
        shown="a small demo model",
    )
    revision: str | None = _model(None, "Branch, tag or commit of a hub model.", metavar="REV")
    device: str = _model(
        "auto", "Device to run on: cpu, cuda, cuda:N, xpu, mps or auto (CBATCH_DEVICE, else a GPU if there is one)."
    )
    dtype: str = _model(
        "auto", "Data type of the model; auto keeps the stored one if the device is fast at it.", choices=FLOAT_TYPES
    )
    quantize: str | None = _model(
        None,
        "Quantize weights to one byte each, or to half a byte (models with a fast path); auto tries half a byte first.",
        metavar="none|int8|int4|auto",
        parse=lambda text: None if text == "none" else text,
        shown="none",
    )
    activations: str = _model(
        "int8",
        "How products with quantized weights round activations. On a CPU, bf16 is slower and more exact than int8; fp8 "
        "is for FP8 weights on GPUs that multiply FP8.",
        metavar="int8|bf16|fp8",
    )
    tensor_parallel: int | Literal["auto"] = _model(
        "auto",
        "Split every layer over N GPUs, which compute each step together.",
        more="auto: over as few as hold the model, if one does not.",
        metavar="auto|N",
        low=1,
        parse=lambda text: parse_count(text, "auto"),
    )
    device_map: Literal["none", "auto"] = _model(
        "none", "Spread a model that is larger than its device over GPUs, CPU memory and disk."
    )
    max_memory: Mapping[str, str | int] | None = _model(
        None,
        'Most memory for weights on each device, with --device-map: \'{"cuda:0": "20GiB", "cpu": "50%"}\'.',
        more="Of the others 80% of what is free.",
        metavar="JSON",
        parse=parse_json,
    )
    offload_folder: str | None = _model(
        None, "Folder for weights rewritten for the disk, with --device-map.", metavar="DIR", is_file=True
    )
    reply_format: str = _model(
        "auto",
        "What the model writes: how it marks reasoning and tool calls; auto: as its chat template shows.",
        metavar="NAME",
        choices=REPLY_FORMATS,
    )
    chat_template: str | None = _model(
        None,
        "Jinja chat template instead of the model's own: a file, or the text itself.",
        more="Such as one that takes tools. It is part of a row's key.",
        metavar="FILE|TEXT",
    )
    max_model_len: int | None = _engine(
        None,
        "Longest context, prompt and output together, in tokens.",
        more="At most the model's own, which is the default. On a CPU, the KV cache is as large as it needs.",
        metavar="N",
        low=1,
    )
    max_seqs: int | None = _engine(
        None,
        "Most requests that run at once.",
        more="Default: 256 on a GPU, 512 on one of 40 GB that the weights take at most half of; 32 on a CPU.",
        low=1,
    )
    max_batch_tokens: int | None = _engine(
        None,
        "Most tokens computed in one step; longer prompts are split.",
        more="Default: 2,048 on a GPU, 8,192 where --max-seqs is 512 by default; 512 on a CPU.",
        low=1,
    )
    threads: int | None = _engine(
        None,
        "Threads that compute on the CPU, of each replica.",
        more="Default: one a core, as far as affinity and the quota of a container allow; `cbatch info` says why.",
        low=1,
        high=1024,
    )
    prefix_cache: bool = _engine(True, "Compute the shared beginnings of prompts only once.")
    attention: str = _engine("auto", "Attention backend: auto, cpu, triton or reference.", metavar="NAME")
    deterministic: bool = _engine(
        False,
        "Give a row the same bits whatever runs beside it; a CPU's fast path always does, a GPU takes longer.",
        more="Also however its prompt was cut, and whether it was preempted.",
    )
    cuda_graphs: bool = _engine(True, "Replay steps from CUDA graphs, on a GPU.")
    run_ahead: bool | None = _engine(None, "Overlap scheduling with execution.", shown="on for CUDA")
    target_step_ms: float | Literal["auto"] | None = _engine(
        None,
        "Limit the time of a step, and so the time between tokens, while prompts are prefilled.",
        more="auto: 1.75 times the time of a step without prompts.",
        metavar="MS|auto|none",
        parse=_parse_target,
        shown="none",
    )
    speculate: int | Literal["auto", "off"] = _engine(
        "auto",
        "Draft up to N tokens of a request in a step, from text so far; auto: if it pays. Changes no output.",
        metavar="auto|N|off",
        low=1,
        parse=lambda text: parse_count(text, "auto", "off"),
    )
    block_size: int = _memory(16, "Tokens in a block of the KV cache.", low=1)
    kv_dtype: str = _memory(
        "auto",
        "Type of the KV cache; fp8 (GPU) and u8 (CPU) take one byte a number.",
        more="u8 has a scale for the numbers of each token and head.",
        metavar="auto|fp8|u8",
    )
    kv_cache_memory: str | None = _memory(
        None,
        "Size of the KV cache: 4GiB, or 90% of free memory.",
        more="Default: 90% on a GPU, 25% on a CPU. On a GPU, a percentage is reduced as needed, so that the largest "
        "step still fits.",
        metavar="SIZE",
    )
    kv_blocks: int | None = _memory(None, "Exact number of blocks in the KV cache (for tests).", low=1)
    media_cache: str = _memory("512MiB", "Size of the cache of what the vision tower made of images.", metavar="SIZE")
    state_dtype: str = _memory(
        "auto",
        "Type of recurrent states, of models that have any.",
        more="auto: that in which the model's reference has them.",
        choices=FLOAT_TYPES,
    )
    state_slots: int | None = _memory(
        None, "Exact number of slots for recurrent states, requests and snapshots together (for tests).", low=1
    )
    weight_cache: bool = _memory(
        True,
        "Keep packed weights in ~/.cache/cbatch for the next start, on a CPU.",
        more="Engines of other processes map the same file (Linux).",
    )
    weight_cache_size: str | None = _memory(
        None, "Most that they may take: 50GiB, or a share of the free disk.", metavar="SIZE", shown="50%"
    )
    weights_folder: str | None = None
    """Folder of this user alone for packed weights, also of small models; None: `~/.cache/cbatch/weights`."""
    lora: Mapping[str, str] | None = None
    """LoRA adapters that requests may name, in folders or hub ids: {"sql": "adapters/sql"}."""

    media_root: str = "."
    """Folder below which images of prompts must lie; those of `cbatch run` have an option."""
    allow_remote_media: bool = False
    """Whether images of prompts are fetched from http: and https: URLs."""

    __repr__ = differing

    @property
    def min_gpus(self) -> int:
        """GPUs that a GPU's engine takes at least."""
        return 1 if self.tensor_parallel == "auto" else self.tensor_parallel

    def __post_init__(self) -> None:
        if self.chat_template is not None:  # here, so that processes on other machines need no file
            object.__setattr__(self, "chat_template", _read_template(self.chat_template))
        check_options(self)
        if not isinstance(self.weights_folder, str | None):
            raise ConfigError(f"weights_folder must be a text, not {self.weights_folder!r}.")
        if self.deterministic and self.activations == "fp8":
            raise ConfigError(
                "--activations fp8 multiplies by products of the library, which depend on the number of rows; leave it "
                "out with --deterministic."
            )
        _check_max_memory(self.max_memory)
        if self.lora is not None:
            is_named = isinstance(self.lora, Mapping) and all(
                isinstance(text, str) and text for item in self.lora.items() for text in item
            )
            if not is_named:
                raise ConfigError(
                    'lora must give each adapter a name and a folder, such as {"sql": "adapters/sql"}, '
                    f"not {self.lora!r}."
                )
            if self.lora and self.device_map == "auto":
                raise ConfigError("A model that is spread over devices takes no LoRA adapters; leave out --device-map.")
        if self.device_map == "none":
            for name in ("max_memory", "offload_folder"):
                if getattr(self, name) is not None:
                    raise ConfigError(f"--{name.replace('_', '-')} is only for --device-map auto.")
        elif self.tensor_parallel not in ("auto", 1):
            raise ConfigError("--device-map gives each device whole layers, and --tensor-parallel a part of every one.")
        elif self.quantize is not None:
            raise ConfigError(
                "--device-map auto runs a model by the layers of transformers, which have no quantized weights here; "
                "leave out --quantize or --device-map."
            )


EngineOptions = TypedDict("EngineOptions", {  # noqa: UP013
    "revision": str | None, "device": str, "dtype": str | Any, "quantize": str | None, "activations": str,
    "tensor_parallel": int | Literal["auto"], "device_map": Literal["none", "auto"],
    "max_memory": Mapping[str, str | int] | None, "offload_folder": str | None, "reply_format": str,
    "chat_template": str | os.PathLike[str] | None, "max_model_len": int | None, "max_seqs": int | None,
    "max_batch_tokens": int | None, "threads": int | None, "prefix_cache": bool, "attention": str,
    "deterministic": bool, "cuda_graphs": bool, "run_ahead": bool | None,
    "target_step_ms": float | Literal["auto"] | None, "speculate": int | Literal["auto", "off"], "block_size": int,
    "kv_dtype": str, "kv_cache_memory": str | None, "kv_blocks": int | None, "media_cache": str, "state_dtype": str,
    "state_slots": int | None, "weight_cache": bool, "weight_cache_size": str | None, "weights_folder": str | None,
    "lora": Mapping[str, str] | None, "media_root": str, "allow_remote_media": bool,
}, total=False)  # fmt: skip
"""The fields of `EngineConfig`, except `model`, as arguments of a call."""


def _read_template(given: Any) -> Any:
    """The text of a chat template, which is given itself or in a file. Raises ConfigError if it cannot be read."""
    if not isinstance(given, os.PathLike) and (not isinstance(given, str) or _is_template(given)):
        return given
    with os_errors_as(ConfigError, f"Cannot read the chat template {os.fspath(given)!r}"):
        data = Path(given).expanduser().read_bytes()
    if not _is_template(text := data.decode("utf-8", "replace")) or "\ufffd" in text:
        raise ConfigError(f"{os.fspath(given)!r} holds no chat template, which is text with {{{{ or {{% in it.")
    return text


def _is_template(text: str) -> bool:
    return "{%" in text or "{{" in text


def _check_max_memory(limits: Any) -> None:
    if limits is None:
        return
    if not isinstance(limits, Mapping):
        raise ConfigError(
            f'max_memory must say how much each device may hold, such as {{"cpu": "30GiB"}}, not {limits!r}.'
        )
    for device, amount in limits.items():
        if not isinstance(device, str) or not re.fullmatch(r"cpu|cuda:\d+", device):
            raise ConfigError(f"max_memory: there is no device {device!r}; write cpu or cuda:N.")
        if isinstance(amount, bool) or not isinstance(amount, int | str):
            raise ConfigError(f"max_memory: {amount!r} is not an amount of memory; write it as 4GiB, 500MiB or 90%.")
        parse_memory(str(amount), free=0)
