"""Folders of tiny models with quantized weights, written by hand from the specification of each format.

Each encoder packs a matrix [rows, depth] number by number as the format's own documentation has it, and gives the
numbers that were packed. Nothing here is shared with what reads the files.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from cbatch.base.config import EngineConfig
from cbatch.base.params import SamplingParams
from cbatch.engine.stepping_engine import SteppingEngine
from tests.support.generation import generate
from tests.support.gguf_files import gguf_model, network_of
from tests.support.programs import SavedModel
from tests.support.tiny_models import generate_alone

SIZES = {"hidden_size": 256, "intermediate_size": 256, "head_dim": 64}
"""Of models whose rows groups of 128 and K-quants divide."""

Encoded = tuple[dict[str, Tensor], Tensor]
"""Tensors by what follows the name of the module, and the numbers that they stand for."""

Encoder = Callable[[Tensor], Encoded]


def tiny_model(kind: str = "qwen3", **sizes: Any) -> SavedModel:
    saved = gguf_model(kind, **SIZES | sizes)
    return replace(saved, config=saved.config | {"eos_token_id": 0})


def write_folder(
    folder: Path,
    saved: SavedModel,
    settings: Mapping[str, Any],
    encode: Encoder | Callable[[str], Encoder | None],
    *,
    by_name: bool = False,
    also: Mapping[str, Encoder] | None = None,
) -> Any:
    """Writes a model; returns a float32 network of transformers with the numbers that the files have.

    encode:  of every matrix `*_proj`, or of a tensor of those of all experts
    by_name: `encode` gives the encoder for the name of a module, None for one that is not quantized
    also:    encoders of other modules by their names
    """
    folder.mkdir(parents=True, exist_ok=True)
    stored, numbers = {}, {}
    for name, tensor in saved.tensors.items():
        module = name.removesuffix(".weight")
        is_matrix = name.endswith("_proj.weight") or (tensor.ndim == 3 and name.endswith("_proj"))
        chosen: Any = encode(module) if by_name and module.endswith("_proj") else encode  # type: ignore[arg-type]
        if also and module in also:
            is_matrix, chosen = True, also[module]
        if not is_matrix or chosen is None:
            stored[name] = numbers[name] = tensor.clone()
            continue
        parts, numbers[name] = chosen(tensor.float())
        stored |= {module + end: part.contiguous() for end, part in parts.items()}
    config = {**saved.config, "quantization_config": dict(settings)}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(stored, folder / "model.safetensors", {"format": "pt"})
    return network_of(folder.with_name(folder.name + "-reference"), saved.config, numbers)


def change_tensors(folder: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    """Writes the weights of a folder once more."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})


def equals_generate(folder: Path, network: Any, prompts: list[list[int]]) -> bool:
    """Whether a folder's fast path gives 12 tokens for each prompt in float32 that are those of a network."""
    network.generation_config.eos_token_id = None
    config = EngineConfig(
        model=str(folder), block_size=16, kv_blocks=60, max_batch_tokens=32, device="cpu", dtype="float32",
        weight_cache=False,
    )  # fmt: skip
    engine = SteppingEngine(config)
    assert engine.loaded.path == "fast"
    outputs = generate(engine, prompts, SamplingParams(max_tokens=12, ignore_eos=True))
    return [list(output.token_ids) for output in outputs] == generate_alone(network, prompts, [12] * len(prompts))


def in_groups(numbers: Tensor, group: int, bits: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Integers [rows, depth] from 0, scales and zero points [rows, groups], rounded as all these formats do."""
    group = numbers.shape[1] if group == -1 else group
    each = numbers.view(len(numbers), -1, group)
    most = 2**bits - 1
    if symmetric:
        scales = (each.abs().amax(-1) * 2 / most).half()
        zeros = torch.full_like(scales, 2 ** (bits - 1))
    else:
        low, high = each.amin(-1).clamp(max=0), each.amax(-1).clamp(min=0)
        scales = ((high - low) / most).half()
        zeros = (-low / scales.float()).round().clamp(0, most)
    codes = (each / scales.float()[..., None]).round() + zeros.float()[..., None]
    return codes.clamp(0, most).to(torch.int64).view(numbers.shape), scales, zeros.to(torch.int64)


def values_of(codes: Tensor, scales: Tensor, zeros: Tensor, group_of: Tensor | None = None) -> Tensor:
    """scale * (integer - zero point), in float32. group_of: [depth] group of each number, in turn by default"""
    if group_of is None:
        group_of = torch.arange(codes.shape[1]) // (codes.shape[1] // scales.shape[1])
    return scales.float()[:, group_of] * (codes - zeros[:, group_of]).float()


def words(codes: Tensor, bits: int, axis: int, order: list[int] | None = None) -> Tensor:
    """Integers as int32, each with several of them along an axis: bits i of a word are number order[i]."""
    each = 32 // bits
    order = order or list(range(each))
    moved = codes.movedim(axis, -1)
    padded = torch.nn.functional.pad(moved, (0, -moved.shape[-1] % each))
    parts = padded.reshape(*moved.shape[:-1], -1, each)
    packed = sum((parts[..., order[i]] & (2**bits - 1)) << (bits * i) for i in range(each))
    assert isinstance(packed, Tensor)
    signed = torch.where(packed >= 2**31, packed - 2**32, packed)
    return signed.to(torch.int32).movedim(-1, axis).contiguous()


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]


def awq(group: int = 128, *, symmetric: bool = False, order: list[int] = AWQ_ORDER, shift: int = 0) -> Encoder:
    """https://github.com/casper-hansen/AutoAWQ, `WQLinear_GEMM.from_linear`. shift: added to zero points in the file"""

    def encode(numbers: Tensor) -> Encoded:
        codes, scales, zeros = in_groups(numbers, group, 4, symmetric=symmetric)
        parts = {".qweight": words(codes.T, 4, 1, order), ".scales": scales.T}
        if not symmetric:
            parts[".qzeros"] = words((zeros + shift).clamp(0, 15).T, 4, 1, order)
        return parts, values_of(codes, scales, zeros)

    return encode


def awq_settings(group: int = 128, *, zero_point: bool = True, **others: Any) -> dict[str, Any]:
    return {
        "quant_method": "awq", "version": "gemm", "bits": 4, "group_size": group, "zero_point": zero_point,
        "modules_to_not_convert": None, "backend": "autoawq", **others,
    }  # fmt: skip


def gptq(
    bits: int = 4, group: int = 128, *, symmetric: bool = True, version: int = 1, act_order: bool = False
) -> Encoder:
    """https://github.com/AutoGPTQ/AutoGPTQ, `QuantLinear.pack`. version: 1 stores zero points minus one"""

    def encode(numbers: Tensor) -> Encoded:
        depth = numbers.shape[1]
        order = torch.randperm(depth, generator=torch.Generator().manual_seed(1)) if act_order else torch.arange(depth)
        codes, scales, zeros = in_groups(numbers[:, order], group, bits, symmetric=symmetric)
        zeros = zeros if symmetric or version == 2 else zeros.clamp(min=1)  # version 1 cannot store 0
        back = torch.argsort(order)
        codes, group_of = codes[:, back], back // (depth if group == -1 else group)
        parts = {
            ".qweight": words(codes.T, bits, 0), ".scales": scales.T, ".g_idx": group_of.to(torch.int32),
            ".qzeros": words((zeros - int(version == 1)).T, bits, 1),
        }  # fmt: skip
        return parts, values_of(codes, scales, zeros, group_of)

    return encode


def gptq_settings(bits: int = 4, group: int = 128, **others: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": bits, "group_size": group, "damp_percent": 0.1, "desc_act": False, "sym": True,
        "true_sequential": True, "model_name_or_path": None, "model_file_base_name": "model", **others,
    }  # fmt: skip


def compressed(bits: int = 4, group: int = 128, *, symmetric: bool = True, raw_zeros: bool = False) -> Encoder:
    """https://github.com/vllm-project/compressed-tensors, `pack_quantized.py`. raw_zeros: zero points in int8"""

    def encode(numbers: Tensor) -> Encoded:
        codes, scales, zeros = in_groups(numbers, group, bits, symmetric=symmetric)
        parts = {
            ".weight_packed": words(codes, bits, 1), ".weight_scale": scales.bfloat16(),
            ".weight_shape": torch.tensor(codes.shape),
        }  # fmt: skip
        if not symmetric:
            signed = (zeros - 2 ** (bits - 1)).to(torch.int8)
            parts[".weight_zero_point"] = signed if raw_zeros else words(zeros, bits, 0)
        return parts, values_of(codes, scales.bfloat16(), zeros)

    return encode


def whole_int8(*, per_tensor: bool = False) -> Encoder:
    """Integers of 8 bits, with a scale for each row or for all, and one of what they are multiplied with."""

    def encode(numbers: Tensor) -> Encoded:
        scales = numbers.abs().amax(1, keepdim=True) / 127
        scales = (scales.amax().view(1) if per_tensor else scales).bfloat16()
        codes = (numbers / scales.float()).round().clamp(-128, 127)
        parts = {".weight": codes.to(torch.int8), ".weight_scale": scales, ".input_scale": torch.ones(1)}
        return parts, codes * scales.float()

    return encode


def compressed_settings(format: str = "pack-quantized", **weights: Any) -> dict[str, Any]:
    """weights: of the scheme, beside those of w4a16 in groups of 128"""
    scheme = {
        "num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 128, "dynamic": False,
        "actorder": None, "block_structure": None, "observer": "minmax", "observer_kwargs": {}, **weights,
    }  # fmt: skip
    group = {"targets": ["Linear"], "weights": scheme, "input_activations": None, "output_activations": None}
    return {
        "quant_method": "compressed-tensors", "format": format, "quantization_status": "compressed",
        "config_groups": {"group_0": group}, "ignore": ["lm_head"], "kv_cache_scheme": None,
        "global_compression_ratio": 1.2, "sparsity_config": {}, "transform_config": {}, "version": "0.12",
    }  # fmt: skip


def fp8(block: tuple[int, int] | None = (128, 128), scale: str = "weight_scale_inv") -> Encoder:
    """float8_e4m3fn with a factor for each block. block: (0, 0) for all of a matrix, and None for each row"""

    def encode(numbers: Tensor) -> Encoded:
        rows, depth = numbers.shape
        high, wide = (1, depth) if block is None else block if block[0] else (rows, depth)
        padded = torch.nn.functional.pad(numbers, (0, -depth % wide, 0, -rows % high))
        blocks = padded.view(-(-rows // high), high, -(-depth // wide), wide)
        factors = blocks.abs().amax((1, 3), keepdim=True) / 448
        codes = (blocks / factors).to(torch.float8_e4m3fn)
        stored = factors.flatten(1) if block != (0, 0) else factors.view(1)
        values = (codes.float() * factors).view(padded.shape)[:rows, :depth]
        return {".weight": codes.view(padded.shape)[:rows, :depth], f".{scale}": stored}, values

    return encode


def fp8_settings(block: tuple[int, int] | None = (128, 128), **others: Any) -> dict[str, Any]:
    return {
        "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": block,
        "modules_to_not_convert": ["lm_head"], **others,
    }  # fmt: skip


def mxfp8(numbers: Tensor) -> Encoded:
    """float8_e4m3fn, of which 32 numbers share a power of 2."""
    groups = numbers.unflatten(1, (-1, 32))  # type: ignore[no-untyped-call]
    exponents = (groups.abs().amax(-1) / 448).log2().ceil()
    codes = (groups / 2 ** exponents[..., None]).to(torch.float8_e4m3fn)
    parts = {".weight": codes.flatten(1), ".weight_scale": (exponents + 127).to(torch.uint8)}
    return parts, (codes.float() * 2 ** exponents[..., None]).flatten(1)


def without(encode: Encoder, end: str) -> Encoder:
    """An encoder's parts but one."""

    def encode_less(numbers: Tensor) -> Encoded:
        parts, values = encode(numbers)
        return {name: part for name, part in parts.items() if name != end}, values

    return encode_less


def auto_round_settings(packing: str = "auto_round:auto_gptq", **others: Any) -> dict[str, Any]:
    return {
        "quant_method": "auto-round", "packing_format": packing, "bits": 4, "group_size": 128, "sym": True,
        "data_type": "int", "autoround_version": "0.9.2", "block_name_to_quantize": "model.layers", "iters": 1000,
        "batch_size": 4, "low_gpu_mem_usage": True, "enable_quanted_input": False, **others,
    }  # fmt: skip


FP4 = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])


def e2m1(scaled: Tensor) -> tuple[Tensor, Tensor]:
    """Bytes of two numbers each, along the last dimension, and the numbers that they stand for."""
    codes = (scaled.abs()[..., None] - FP4).abs().argmin(-1) + 8 * (scaled < 0)
    return (codes[..., 0::2] | codes[..., 1::2] << 4).to(torch.uint8), torch.where(scaled < 0, -1, 1) * FP4[codes % 8]


def nvfp4(group: int = 16, *, divides: bool = False) -> Encoder:
    """https://github.com/NVIDIA/Model-Optimizer, `NVFP4QTensor.quantize`; also experts [experts, depth, rows].

    divides: as https://github.com/vllm-project/compressed-tensors has it, `nvfp4`
    """

    def encode(numbers: Tensor) -> Encoded:
        groups = numbers.transpose(-1, -2) if numbers.ndim == 3 else numbers
        groups = groups.unflatten(-1, (-1, group))  # type: ignore[no-untyped-call]
        factor = groups.abs().amax() / (6 * 448)
        scales = (groups.abs().amax(-1) / 6 / factor).to(torch.float8_e4m3fn)
        each = scales.float() * factor
        pairs, values = e2m1(groups / each[..., None])
        pairs, values = pairs.flatten(-2), (values * each[..., None]).flatten(-2)
        if numbers.ndim == 3:
            parts = {"": pairs.transpose(1, 2), "_weight_scale": scales.transpose(1, 2), "_weight_scale_2": factor}
            return parts | {"_input_scale": torch.ones(())}, values.transpose(1, 2)
        if divides:
            parts = {".weight_packed": pairs, ".weight_global_scale": (1 / factor).view(1)}
            return parts | {".weight_scale": scales, ".input_global_scale": torch.ones(1)}, values
        parts = {".weight": pairs, ".weight_scale": scales, ".weight_scale_2": factor, ".input_scale": torch.ones(())}
        return parts, values

    return encode


def modelopt_settings(algorithm: str = "NVFP4", **others: Any) -> dict[str, Any]:
    """https://github.com/NVIDIA/Model-Optimizer, `convert_hf_quant_config_format`."""
    return {
        "config_groups": {"group_0": {"weights": {"dynamic": False, "num_bits": 4, "type": "float"}}},
        "ignore": ["lm_head", "model.layers.0.self_attn*"], "quant_algo": algorithm, "quant_method": "modelopt",
        "kv_cache_scheme": {"dynamic": False, "num_bits": 8, "type": "float"},
        "producer": {"name": "modelopt", "version": "0.44.0"}, **others,
    }  # fmt: skip


def mxfp4_packed(numbers: Tensor) -> Encoded:
    """https://github.com/vllm-project/compressed-tensors, `mxfp4`"""
    groups = numbers.unflatten(1, (-1, 32))  # type: ignore[no-untyped-call]
    exponents = (groups.abs().amax(-1, keepdim=True) / 6).log2().ceil()
    pairs, values = e2m1(groups / 2**exponents)
    parts = {".weight_packed": pairs.flatten(1), ".weight_scale": (exponents[..., 0] + 127).to(torch.uint8)}
    return parts, (values * 2**exponents).flatten(1)


def mxfp4(numbers: Tensor) -> Encoded:
    """The experts of GPT-OSS, [experts, depth, rows], in the Microscaling format; other matrices stay numbers."""
    if numbers.ndim == 2:
        return {".weight": numbers}, numbers
    groups = numbers.transpose(1, 2).unflatten(2, (-1, 32))  # type: ignore[no-untyped-call]
    exponents = (groups.abs().amax(-1, keepdim=True) / 6).log2().ceil()
    pairs, values = e2m1(groups / 2**exponents)
    parts = {"_blocks": pairs, "_scales": (exponents[..., 0] + 127).to(torch.uint8)}
    return parts, (values * 2**exponents).flatten(2).transpose(1, 2)


NF4 = torch.tensor([
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635, -0.18477343022823334,
    -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725, 0.24611230194568634, 0.33791524171829224,
    0.44070982933044434, 0.5626170039176941, 0.7229568362236023, 1.0,
])  # fmt: skip


def nf4(*, nested: bool) -> Encoder:
    """https://github.com/bitsandbytes-foundation/bitsandbytes, `quantize_4bit`. nested: scales are quantized, too"""

    def encode(numbers: Tensor) -> Encoded:
        blocks = numbers.reshape(-1, 64)
        scales = blocks.abs().amax(1)
        state: dict[str, Any] = {"quant_type": "nf4", "blocksize": 64, "dtype": "bfloat16", "shape": [*numbers.shape]}
        parts = {".weight.quant_map": NF4.clone(), ".weight.absmax": scales}
        if nested:
            offset, table = scales.mean(), torch.linspace(-1, 1, 256)
            rest = torch.nn.functional.pad(scales - offset, (0, -len(scales) % 256)).view(-1, 256)
            steps = rest.abs().amax(1)
            places = ((rest / steps[:, None])[..., None] - table).abs().argmin(-1)
            scales = (table[places] * steps[:, None]).flatten()[: len(scales)] + offset
            state |= {"nested_blocksize": 256, "nested_offset": offset.item(), "nested_dtype": "float32"}
            parts |= {
                ".weight.absmax": places.flatten()[: len(scales)].to(torch.uint8), ".weight.nested_absmax": steps,
                ".weight.nested_quant_map": table,
            }  # fmt: skip
        codes = ((blocks / scales[:, None])[..., None] - NF4).abs().argmin(-1)
        pairs = codes.view(-1, 2)
        parts[".weight"] = (pairs[:, :1] << 4 | pairs[:, 1:]).to(torch.uint8)
        parts[".weight.quant_state.bitsandbytes__nf4"] = torch.tensor([*json.dumps(state).encode()], dtype=torch.uint8)
        return parts, (NF4[codes] * scales[:, None]).view(numbers.shape)

    return encode


def nf4_settings(*, nested: bool, **others: Any) -> dict[str, Any]:
    return {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "_load_in_4bit": True, "load_in_8bit": False,
        "_load_in_8bit": False, "bnb_4bit_quant_type": "nf4", "bnb_4bit_compute_dtype": "bfloat16",
        "bnb_4bit_use_double_quant": nested, "bnb_4bit_quant_storage": "uint8", "llm_int8_threshold": 6.0, **others,
    }  # fmt: skip
