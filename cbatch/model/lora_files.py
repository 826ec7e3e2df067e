"""LoRA adapters in the folders of PEFT: read whole, or refused because they would be silently wrong.

LoRA: Hu et al., https://arxiv.org/abs/2106.09685. The files are those of `PeftModel.save_pretrained`.
"""

from __future__ import annotations

import hashlib
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from cbatch.base.errors import ModelError
from cbatch.base.hub import looks_like_path, reachable_source
from cbatch.base.model_files import check_files, check_source, model_folder, read_json_object
from cbatch.model.config import FLAG, TEXT, Kind, check_settings, number, patterns, whole

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"

_NAME = re.compile(r"base_model\.model\.(.+)\.lora_([AB])\.weight")

_WITHOUT_EFFECT = frozenset(
    "auto_mapping base_model_name_or_path ensure_weight_tying eva_config exclude_modules fan_in_fan_out inference_mode "
    "layers_pattern layers_to_transform lora_dropout megatron_core peft_version qalora_group_size revision "
    "runtime_config target_modules task_type".split()
)
"""Keys that say how an adapter was trained, or what its tensors say themselves."""

_KINDS: dict[str, Kind] = {
    "peft_type": TEXT,
    "bias": TEXT,
    "r": whole(1, 2**16),
    "lora_alpha": number(-(2**16), 2**16),
    "use_rslora": FLAG,
    "rank_pattern": patterns(whole(1, 2**16)),
    "alpha_pattern": patterns(number(-(2**16), 2**16)),
}
_READ = _KINDS.keys() | {"init_lora_weights"}

_REASONS = {
    "use_dora": "it is a DoRA adapter, which also scales the model's own weights",
    "modules_to_save": "it replaces whole modules (modules_to_save)",
    "target_parameters": "it adapts parameters that are not linears, such as experts (target_parameters)",
    "trainable_token_indices": "it has embeddings of its own (trainable_token_indices)",
    "lora_bias": "its matrices have biases (lora_bias)",
    "alora_invocation_tokens": "it works only from certain tokens on (alora_invocation_tokens)",
}

_PLAIN_BEGINNINGS = (True, False, "gaussian", "eva", "orthogonal")
"""Ways to begin the training of an adapter that leave the model's own weights as they are."""

_EMPTY: tuple[Any, ...] = (None, False, "", [], {})


@dataclass(frozen=True, slots=True, eq=False)
class LowRank:
    """The two matrices by whose product with an input an adapter adds to a linear.

    down: [rank, depth] float32
    up:   [columns, rank] float32, multiplied with the adapter's scale
    """

    down: Tensor
    up: Tensor


@dataclass(frozen=True, slots=True, eq=False)
class Adapter:
    """An adapter with its weights.

    name:    by which requests ask for it
    modules: what it adds, by the names of the model's linears
    """

    name: str
    modules: Mapping[str, LowRank]

    @property
    def num_parameters(self) -> int:
        return sum(one.down.numel() + one.up.numel() for one in self.modules.values())

    def fingerprint(self) -> str:
        """A hash of all its weights, 32 hexadecimal digits; its name and its folder do not count."""
        digest = hashlib.blake2b(digest_size=16)
        for name, low_rank in sorted(self.modules.items()):
            digest.update(f"{name} {tuple(low_rank.down.shape)} {tuple(low_rank.up.shape)}".encode())
            for matrix in (low_rank.down, low_rank.up):
                digest.update(matrix.contiguous().numpy().data)
        return digest.hexdigest()

    def check_size(self, module: str, size: tuple[int, ...]) -> None:
        """Raises ModelError unless a linear [columns, depth] of the model is as large as its own."""
        columns, depth = self.modules[module].up.shape[0], self.modules[module].down.shape[1]
        if (columns, depth) != size:
            raise self.refused(
                f"it was made for another model: {module} is {size[0]} x {size[1]} here, and {columns} x {depth} there"
            )

    def refused(self, reason: str) -> ModelError:
        return _refused(self.name, reason)


def read_adapters(places: Mapping[str, str]) -> tuple[Adapter, ...]:
    """The adapters in these folders, or of these hub ids, by name.

    Raises ModelError, which says why, for one that cannot be read or does more than add to linears.
    """
    return tuple(_read(name, place) for name, place in places.items())


def _refused(name: str, reason: str) -> ModelError:
    return ModelError(f"The LoRA adapter {name} cannot be used: {reason}.")


def _read(name: str, place: str) -> Adapter:
    try:
        check_source(place)
        folder = _folder(place)
        check_files(folder)
        config = read_json_object(folder / CONFIG)
        check_settings(config, _KINDS, folder / CONFIG)
        _check_settings(config)
        return Adapter(name, _modules(config, load_file(folder / WEIGHTS)))
    except ModelError as error:
        raise _refused(name, str(error).rstrip(".")) from error
    except (OSError, SafetensorError, ValueError, TypeError, MemoryError, re.error, ArithmeticError) as error:
        raise _refused(name, f"{place} cannot be read ({error})") from error


def _folder(place: str) -> Path:
    """A folder, or that of a hub id in the local cache, into which it is downloaded."""
    if looks_like_path(place) and not Path(place).is_dir():
        raise ModelError(f"there is no folder {place}")
    folder = Path(place)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        try:
            folder = Path(snapshot_download(place, allow_patterns=[CONFIG, WEIGHTS], local_files_only=True))
        except OSError:
            folder = model_folder(reachable_source(place, None), None, [CONFIG, WEIGHTS])
    if not (folder / CONFIG).is_file():
        raise ModelError(f"{place} has no {CONFIG}, as PEFT writes it")
    if not (folder / WEIGHTS).is_file():
        pickled = " Other formats may hold code; in PEFT, save_pretrained(safe_serialization=True) writes it."
        raise ModelError(f"{place} has no {WEIGHTS}.{pickled}")
    return folder


def _check_settings(config: Mapping[str, Any]) -> None:
    """Raises ModelError for settings that ask for more than products with two matrices."""
    if config.get("peft_type") != "LORA":
        raise ModelError(f"it is of type {config.get('peft_type')!r}, not LORA")
    if config.get("bias", "none") != "none":
        raise ModelError(f"it has biases of its own (bias = {config['bias']!r})")
    beginning = config.get("init_lora_weights", True)
    if beginning not in _PLAIN_BEGINNINGS:
        raise ModelError(f"its training changed the model's own weights (init_lora_weights = {beginning!r})")
    for key, value in config.items():
        if key not in _READ and key not in _WITHOUT_EFFECT and value not in _EMPTY:
            unknown = f"its {CONFIG} says {key} = {str(value)[:60]!r}, which is not known here"
            raise ModelError(_REASONS.get(key, unknown))


def _modules(config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> dict[str, LowRank]:
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        match = _NAME.fullmatch(name)
        if match is None:
            kind = "embeddings" if "embedding" in name else "more than matrices of linears"
            raise ModelError(f"it has {kind} ({name})")
        if not tensor.is_floating_point() or tensor.dim() != 2 or 0 in tensor.shape:
            raise ModelError(f"{name} is no matrix of numbers")
        halves.setdefault(match[1], {})[match[2]] = tensor
    if not halves:
        raise ModelError(f"its {WEIGHTS} holds nothing")
    return {module: _low_rank(config, module, found) for module, found in halves.items()}


def _low_rank(config: Mapping[str, Any], module: str, halves: Mapping[str, Tensor]) -> LowRank:
    if re.search(r"\.experts\b", module):
        raise ModelError(f"it adapts experts ({module})")
    if len(halves) < 2:
        raise ModelError(f"{module} has only one of its two matrices")
    down, up = halves["A"].float(), halves["B"].float()
    rank = _by_pattern(config.get("rank_pattern"), module, config.get("r"))
    if not rank == down.shape[0] == up.shape[1]:
        raise ModelError(f"{module} has ranks {down.shape[0]} and {up.shape[1]}, and its {CONFIG} says {rank}")
    alpha = _by_pattern(config.get("alpha_pattern"), module, config.get("lora_alpha"))
    scale = alpha / (math.sqrt(rank) if config.get("use_rslora") else rank)
    return LowRank(down.contiguous(), (up * scale).contiguous())


def _by_pattern(patterns: Mapping[str, Any] | None, module: str, default: Any) -> Any:
    """A setting of a module. A pattern fits the end of its name, from a dot on, as in PEFT's `get_pattern_key`."""
    fits = (value for pattern, value in (patterns or {}).items() if re.fullmatch(rf"(.*\.)?({pattern})", module))
    return next(fits, default)
