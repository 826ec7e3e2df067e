"""Checkpoints that the package compressed-tensors writes give the numbers that it unpacks, and its tokens."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from cbatch.kernels.formats import BFLOAT16, INT4, INT4_ZEROS, INT8, MXFP4, NVFP4
from cbatch.model.cpu import CpuModel
from cbatch.model.families import read_program
from cbatch.model.formats.quantized import QuantizedCheckpoint, without_quantization
from cbatch.model.load_plan import LoadPlan
from cbatch.model.loader import load_fast_model
from cbatch.model.tensor_files import Tensors
from tests.support.gguf_files import network_of
from tests.support.model_checks import PROMPTS
from tests.support.quantized_folders import equals_generate, tiny_model
from tests.support.samples import sampled

pytestmark = pytest.mark.kernels


@pytest.fixture(autouse=True)
def package() -> None:
    """Imported here and not above: the package takes seconds, and every worker imports all modules of tests."""
    pytest.importorskip("compressed_tensors", reason="needs the package compressed-tensors")


class Case(NamedTuple):
    """weights, activations: arguments of the package; format: of the quantized matrices once they are packed"""

    weights: dict[str, Any]
    format: int
    activations: dict[str, Any] | None = None


GROUPS = {"strategy": "group", "group_size": 128}
CHANNELS = {"strategy": "channel"}
FLOAT, FP4 = ({"num_bits": bits, "type": "float"} for bits in (8, 4))
TOKENS = {"num_bits": 8, "strategy": "token", "dynamic": True}
FLOAT_TOKENS = TOKENS | {"type": "float"}
CASES = {
    "w4a16": Case({"num_bits": 4, **GROUPS}, INT4),
    "w4a16, zero points": Case({"num_bits": 4, "symmetric": False, **GROUPS}, INT4_ZEROS),
    "w4a16, columns": Case({"num_bits": 4, **CHANNELS}, INT4),
    "w4a16, columns, zero points": Case({"num_bits": 4, "symmetric": False, **CHANNELS}, INT4_ZEROS),
    "w4a16, act-order": Case({"num_bits": 4, "strategy": "group", "group_size": 32, "actorder": "weight"}, INT4),
    "w8a16": Case({"num_bits": 8, **GROUPS}, INT8),
    "w8a16, zero points": Case({"num_bits": 8, "symmetric": False, **CHANNELS}, INT8),
    "w8a8": Case({"num_bits": 8, **CHANNELS}, INT8, TOKENS),
    "w8a8, one scale": Case({"num_bits": 8, "strategy": "tensor"}, INT8, {"num_bits": 8, "strategy": "tensor"}),
    "nvfp4": Case(FP4 | {"strategy": "tensor_group", "group_size": 16}, NVFP4),
    "mxfp4": Case(FP4 | {"strategy": "group", "group_size": 32, "scale_dtype": torch.uint8}, MXFP4),
    "fp8, rows": Case({**FLOAT, **CHANNELS}, INT8, FLOAT_TOKENS),
    "fp8, one scale": Case({**FLOAT, "strategy": "tensor"}, INT8, {**FLOAT, "strategy": "tensor"}),
    "fp8, blocks": Case(
        {**FLOAT, "strategy": "block", "block_structure": [128, 128]}, INT8,
        {**FLOAT, "strategy": "group", "group_size": 128, "dynamic": True},
    ),
}  # fmt: skip


def write_folder(folder: Path, case: Case) -> Any:
    """Writes a tiny model as tools over the package do, whose own part is to find the scales. Returns its scheme."""
    from compressed_tensors.compressors import ModelCompressor
    from compressed_tensors.quantization import (
        QuantizationArgs,
        QuantizationConfig,
        QuantizationScheme,
        apply_quantization_config,
    )

    saved = tiny_model()
    network = network_of(folder.with_name("plain"), saved.config, saved.tensors).bfloat16()
    inputs = QuantizationArgs(**case.activations) if case.activations is not None else None
    scheme = QuantizationScheme(targets=["Linear"], weights=QuantizationArgs(**case.weights), input_activations=inputs)
    apply_quantization_config(network, QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"]))
    for module in network.modules():
        if (given := getattr(module, "quantization_scheme", None)) is not None:
            with torch.no_grad():
                for name, found in _scales(module.weight, given.weights).items():
                    if (stored := getattr(module, f"weight_{name}", None)) is not None:
                        stored.copy_(found.view(stored.shape))
    compressor = ModelCompressor.from_pretrained_model(network)
    compressor.compress_model(network)
    network.save_pretrained(folder)
    compressor.update_config(folder)
    return scheme


def _scales(weight: Tensor, arguments: Any) -> dict[str, Tensor]:
    """Scales and zero points of a matrix, from the smallest and largest of the numbers that share one."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    rows, depth = weight.shape
    high, wide = {
        "tensor": (rows, depth), "channel": (1, depth), "group": (1, arguments.group_size),
        "tensor_group": (1, arguments.group_size),
        "block": tuple(arguments.block_structure or ()),
    }[arguments.strategy]  # fmt: skip
    blocks = weight.view(rows // high, high, depth // wide, wide)
    whole = generate_gparam(weight.amin(), weight.amax()) if arguments.strategy == "tensor_group" else None
    scales, zeros = calculate_qparams(blocks.amin((1, 3)), blocks.amax((1, 3)), arguments, whole)
    return {"scale": scales, "zero_point": zeros} | ({} if whole is None else {"global_scale": whole})


def unpacked(folder: Path, scheme: Any) -> dict[str, Tensor]:
    """The numbers of a folder in float32, as the package unpacks them."""
    from compressed_tensors.compressors import BaseCompressor

    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    tensors = load_file(folder / "model.safetensors")
    modules = {name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")}
    numbers = {name: tensor.float() for name, tensor in tensors.items() if name.rpartition(".")[0] not in modules}
    for module in modules:
        state = {
            name.removeprefix(f"{module}."): tensor for name, tensor in tensors.items() if name.startswith(f"{module}.")
        }
        if "fp4" in config["format"]:
            numbers[f"{module}.weight"] = _unpacked_fp4(state, scheme.weights)
            continue
        state["weight_scale"] = state["weight_scale"].float()
        numbers[f"{module}.weight"] = compressor.decompress(state, scheme)["weight"].float()
    return numbers


def _unpacked_fp4(state: Mapping[str, Tensor], arguments: Any) -> Tensor:
    """In float32, for which the package has bfloat16."""
    from compressed_tensors.compressors.mx_utils import decompress_mx_scale
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    packed, scale = state["weight_packed"], state["weight_scale"]
    numbers = unpack_fp4_from_uint8(packed, len(packed), 2 * packed.shape[1], dtype=torch.float32)
    scale = decompress_mx_scale(scale).float() if scale.dtype == torch.uint8 else scale.float()
    whole = state.get("weight_global_scale")
    found: Tensor = dequantize(numbers, scale, args=arguments, global_scale=whole, dtype=torch.float32)
    return found


def read(folder: Path) -> Mapping[str, Tensor]:
    config = json.loads((folder / "config.json").read_text())
    return QuantizedCheckpoint(config).weights(read_program(without_quantization(config)), Tensors(folder))


@pytest.mark.parametrize("name", sampled(CASES, 6, keep=["w4a16, zero points", "fp8, blocks"]))
def test_numbers_and_tokens_are_those_of_the_package(name: str, tmp_path: Path) -> None:
    """Guards what the package writes, which descriptions of it may miss: names, packing, scales and settings."""
    case, folder = CASES[name], tmp_path / "model"
    scheme = write_folder(folder, case)
    expected, found = unpacked(folder, scheme), read(folder)
    assert found.keys() == expected.keys()
    for weight, numbers in expected.items():
        torch.testing.assert_close(found[weight].float(), numbers, rtol=1e-6, atol=0)

    network = network_of(tmp_path / "unpacked", tiny_model().config, expected)
    assert equals_generate(folder, network, PROMPTS[:3])
    model = load_fast_model(LoadPlan(str(folder)))
    assert isinstance(model, CpuModel) and model.formats == {case.format, BFLOAT16}
