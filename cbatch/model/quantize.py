"""Writes a model whose matrices are rounded as `--quantize` rounds them: a folder of compressed-tensors.

See `formats/methods/compressed_tensors.py` for what it consists of. The head, and the embedding if it is the same
matrix, stay numbers for others; `rounded` in the settings names what is read here as int8.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors.torch import save_file
from torch import Tensor

from cbatch.base.errors import CbatchError, ConfigError, ModelError, in_short, os_errors_as
from cbatch.base.hub import is_gguf, reachable_source
from cbatch.base.model_files import WEIGHT_FILES, WEIGHTS_INDEX, check_source, model_folder, weight_files
from cbatch.base.units import format_bytes
from cbatch.kernels.formats import GROUP, INT8, Integers
from cbatch.model.config import UnsupportedConfig, read_model_config
from cbatch.model.formats.quantized import settings_of
from cbatch.model.load_plan import LoadPlan
from cbatch.model.loader import calibration_ids, check_folder, with_head
from cbatch.model.ops.program import Program
from cbatch.model.rounding.calibration import CalibratedWeights, RoundedMatrix, calibrated, chosen
from cbatch.model.tensor_files import Tensors
from cbatch.model.tensor_names import names_in_files
from cbatch.text.isolated import load_tokenizer

_SHARD_BYTES = 4 * 2**30

_COPIED = "*.json", "*.jinja", "*.model", "*.txt", "*.md", "LICENSE*"
"""Files beside the weights."""


def write_quantized(plan: LoadPlan, target: Path) -> str:
    """Writes a new folder; returns a sentence about it.

    plan: names the model, what its weights are rounded to, and the device that rounds them

    Raises ModelError for a model that cannot be read, and ConfigError for one that has no such form, and if the folder
    cannot be written.
    """
    source = plan.source
    if target.exists():
        raise ConfigError(f"{target} exists; name a new folder.")
    check_source(source)
    if is_gguf(source):
        raise ConfigError(f"{source} is quantized already.")
    check_folder(source)
    try:
        folder = model_folder(reachable_source(source, plan.revision), plan.revision, [*_COPIED, *WEIGHT_FILES])
        config, tensors = read_model_config(folder), Tensors(folder)
        if settings_of(config) is not None:
            raise ConfigError(f"{source} is quantized already.")
        program, weights = _rounded(
            replace(plan, ids=calibration_ids(load_tokenizer(str(folder), None))), config, tensors
        )
    except UnsupportedConfig as error:
        raise ConfigError(f"{source} cannot be quantized: {error}.") from error
    except CbatchError:
        raise
    except Exception as error:
        raise ModelError(f"Cannot load {source}: {in_short(error)}.") from error
    if weights is None:
        raise ConfigError(f"{source} has matrices that are changed when they are loaded; use --quantize where it runs.")
    with os_errors_as(ConfigError, f"{target} cannot be written"):
        target.parent.mkdir(parents=True, exist_ok=True)
        with TemporaryDirectory(prefix=f"{target.name}.", dir=target.parent) as beside:
            made = Path(beside) / target.name
            made.mkdir()
            for path in (path for pattern in _COPIED for path in folder.glob(pattern)):
                if path.is_file() and path.name != WEIGHTS_INDEX:
                    shutil.copyfile(path, made / path.name)
            settings = _write_weights(source, program, tensors, weights, made)
            (made / "config.json").write_text(json.dumps({**config, "quantization_config": settings}, indent=2))
            made.replace(target)
    size, before = (sum(path.stat().st_size for path in weight_files(one)) for one in (target, folder))
    return f"{target} has weights of {format_bytes(size)}, {source} of {format_bytes(before)}."


def _rounded(plan: LoadPlan, config: dict[str, Any], tensors: Tensors) -> tuple[Program, CalibratedWeights | None]:
    """A model's program, and its weights as they are to be rounded."""
    assert plan.quantize is not None
    config, program, _ = with_head(config, tensors)
    make = partial(calibrated, config, tensors, plan.device, plan.ids)
    weights = make(in_8_bits=plan.quantize.weights == "int8")
    if plan.quantize.weights == "auto" and chosen(weights) == "int8":
        weights = make(in_8_bits=True)
    return program, weights


def _write_weights(
    source: str, program: Program, tensors: Tensors, weights: CalibratedWeights, folder: Path
) -> dict[str, Any]:
    """Writes the files of weights; returns the settings of quantization."""
    ours = {theirs: name for name, theirs in names_in_files(program, tensors).items()}
    heads = {part.name for part in program.head.parts}
    modules: dict[int, list[str]] = {}
    rounded, written = [], set[str]()
    shards = _Shards(folder)
    for name in sorted(tensors):
        matrix, module = weights.matrices.get(ours.get(name, "")), name.removesuffix(".weight")
        if not isinstance(matrix, RoundedMatrix) or ours[name] in heads:
            shards.add({name: tensors[name]})
            rounded += [module] if isinstance(matrix, RoundedMatrix) else []
            continue
        if module == name or matrix.is_transposed or matrix.num_matrices > 1:
            break
        modules.setdefault(matrix.format, []).append(module)
        integers = matrix.integers(np.arange(matrix.rows), matrix.format)
        shards.add({f"{module}.weight_{end}": part for end, part in _packed(integers, matrix).items()})
        written.add(ours[name])
    if others := {name for name, one in weights.matrices.items() if isinstance(one, RoundedMatrix)} - heads - written:
        raise ConfigError(
            f"{source} has matrices in a form that compressed-tensors does not have, such as {min(others)}; use "
            "--quantize where it runs."
        )
    shards.finish()
    groups = {
        f"group_{number}": {
            "targets": names, "input_activations": None, "output_activations": None,
            "weights": {
                "num_bits": 8 if format == INT8 else 4, "type": "int", "symmetric": format == INT8, "strategy": "group",
                "group_size": GROUP, "dynamic": False,
            },
        }
        for number, (format, names) in enumerate(sorted(modules.items()))
    }  # fmt: skip
    return {
        "quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
        "config_groups": groups, "ignore": ["lm_head"], "rounded": rounded,
    }  # fmt: skip


def _packed(integers: Integers, matrix: RoundedMatrix) -> Mapping[str, Tensor]:
    """The tensors of a matrix by how their names end."""
    bits = 8 if matrix.format == INT8 else 4
    found = {
        "packed": _in_words(integers.numbers.numpy().view(np.uint8) ^ np.uint8(128 if bits == 8 else 0), bits),
        "scale": integers.scales.half(),
        "shape": torch.tensor([matrix.rows, matrix.depth]),
    }
    if integers.zeros is not None:
        found["zero_point"] = _in_words(integers.zeros.to(torch.uint8).T.numpy(), bits).T.contiguous()
    return found


def _in_words(codes: NDArray[np.uint8], bits: int) -> Tensor:
    """Codes [rows, columns] as int32 [rows, words], the first in the lowest bits."""
    codes = np.pad(codes, ((0, 0), (0, -codes.shape[1] % (32 // bits))))
    packed = codes[:, ::2] | codes[:, 1::2] << 4 if bits == 4 else codes
    return torch.from_numpy(np.ascontiguousarray(packed).view(np.int32))


class _Shards:
    """Files of weights in a folder, and their index."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._places: dict[str, str] = {}
        self._held: dict[str, Tensor] = {}
        self._count = 0

    def add(self, tensors: Mapping[str, Tensor]) -> None:
        self._held |= {name: tensor.contiguous() for name, tensor in tensors.items()}
        if sum(tensor.nbytes for tensor in self._held.values()) > _SHARD_BYTES:
            self._write()

    def _write(self) -> None:
        self._count += 1
        name = f"model-{self._count:05}.safetensors"
        save_file(self._held, self._folder / name, {"format": "pt"})
        self._places |= dict.fromkeys(self._held, name)
        self._held = {}

    def finish(self) -> None:
        self._write()
        if self._count == 1:
            (self._folder / self._places.popitem()[1]).replace(self._folder / "model.safetensors")
        else:
            index = {"metadata": {}, "weight_map": self._places}
            (self._folder / WEIGHTS_INDEX).write_text(json.dumps(index, indent=2))
