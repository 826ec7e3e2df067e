"""Quantized checkpoints give what transformers gives with the numbers that their files stand for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple, cast

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers.integrations.mxfp4 import _convert_moe_packed_tensors

from cbatch.attention.cpu import CpuAttention
from cbatch.base.errors import ModelError
from cbatch.base.quantization import Quantization
from cbatch.kernels.formats import BFLOAT16, FORMATS, INT4, INT4_ZEROS, INT8, MXFP4, NVFP4
from cbatch.model.config import UnsupportedConfig
from cbatch.model.cpu import CpuModel
from cbatch.model.formats import settings as reader_settings
from cbatch.model.formats.fp4 import Mxfp4Matrix, Nvfp4Matrix
from cbatch.model.formats.methods import awq as awq_reader
from cbatch.model.formats.methods.awq import AwqMatrix
from cbatch.model.formats.methods.bitsandbytes import NestedMatrix
from cbatch.model.formats.methods.compressed_tensors import CompressedMatrix
from cbatch.model.formats.methods.gptq import GptqMatrix
from cbatch.model.formats.quantized import QuantizedCheckpoint, settings_of
from cbatch.model.load_plan import LoadPlan
from cbatch.model.loader import NoFastPath, load_fast_model, load_model
from cbatch.model.tensor_files import Tensors
from tests.support.model_checks import PROMPTS, reference_logits
from tests.support.programs import PROMPT, error_of, logits_in_chunks, typical_error
from tests.support.quantized_folders import (
    Encoded,
    Encoder,
    auto_round_settings,
    awq,
    awq_settings,
    change_tensors,
    compressed,
    compressed_settings,
    equals_generate,
    fp8,
    fp8_settings,
    gptq,
    gptq_settings,
    modelopt_settings,
    mxfp4,
    mxfp4_packed,
    mxfp8,
    nf4,
    nf4_settings,
    nvfp4,
    tiny_model,
    whole_int8,
    without,
    write_folder,
)
from tests.support.samples import sampled

pytestmark = pytest.mark.kernels


class Case(NamedTuple):
    """A checkpoint.

    formats: of its quantized matrices once they are packed; others stay bfloat16
    label:   how many matrices are stored in which way
    lost:    whether it is said that int8 loses something
    """

    settings: dict[str, Any]
    encode: Encoder
    formats: set[int]
    label: str
    lost: bool = False
    kind: str = "qwen3"


def blocks_in_four_dimensions(numbers: Tensor) -> Encoded:
    """As ModelOpt has the scales of FP8 in blocks."""
    parts, values = fp8(scale="weight_scale")(numbers)
    return parts | {".weight_scale": parts[".weight_scale"][:, None, :, None]}, values


def fp8_experts(numbers: Tensor) -> Encoded:
    """The matrices of all experts with one scale."""
    if numbers.ndim == 2:
        return fp8((0, 0), "weight_scale")(numbers)
    scale = numbers.abs().amax() / 448
    codes = (numbers / scale).to(torch.float8_e4m3fn)
    return {"": codes, "_weight_scale": scale, "_input_scale": torch.ones(())}, codes.float() * scale


def case(settings: dict[str, Any], encode: Encoder, format: int, label: str, *, lost: bool = False) -> Case:
    return Case(settings, encode, {format}, f"14 of {label}", lost)


ZEROS = "groups of 128 with zero points"
FLOAT = {"num_bits": 8, "type": "float", "group_size": None}
WHOLE = {"num_bits": 8, "group_size": None}
FP4 = {"num_bits": 4, "type": "float"}
V2 = {"checkpoint_format": "gptq_v2", "sym": False}
OLD = {"quant_method": "awq", "zero_point": True, "q_group_size": 128, "w_bit": 4, "version": "GEMM"}
CASES = {
    "awq, groups of 128": case(awq_settings(), awq(), INT4_ZEROS, f"4 bits in {ZEROS}"),
    "awq, groups of 32": case(awq_settings(32), awq(32), INT4_ZEROS, "4 bits in groups of 32 with zero points"),
    "awq, columns": case(awq_settings(-1), awq(-1), INT4_ZEROS, "4 bits in columns with zero points"),
    "awq, symmetric": case(awq_settings(64, zero_point=False), awq(64, symmetric=True), INT4, "4 bits in groups of 64"),
    "awq, groups of 16": case(awq_settings(16), awq(16), INT8, "4 bits in groups of 16 with zero points", lost=True),
    "awq, old names": case(OLD, awq(), INT4_ZEROS, f"4 bits in {ZEROS}"),
    "auto-round": case(auto_round_settings(), without(gptq(), ".g_idx"), INT4, "4 bits in groups of 128"),
    "auto-round, zero points": case(
        auto_round_settings("auto_round:gptq", sym=False), without(gptq(symmetric=False), ".g_idx"), INT4_ZEROS,
        f"4 bits in {ZEROS}",
    ),
    "auto-round, its own zero points": case(
        auto_round_settings("auto_round", sym=False), without(gptq(symmetric=False, version=2), ".g_idx"), INT4_ZEROS,
        f"4 bits in {ZEROS}",
    ),
    "auto-round, awq": case(
        auto_round_settings("auto_round:auto_awq", sym=False), awq(), INT4_ZEROS, f"4 bits in {ZEROS}"
    ),
    "auto-round's gptq": case(
        gptq_settings(provider="auto-round", data_type="int", autoround_version="0.9.2", iters=200), gptq(), INT4,
        "4 bits in groups of 128",
    ),
    "gptq": case(gptq_settings(), gptq(), INT4, "4 bits in groups of 128"),
    "gptq, zero points": case(gptq_settings(sym=False), gptq(symmetric=False), INT4_ZEROS, f"4 bits in {ZEROS}"),
    "gptq, version 2": case(
        gptq_settings(**V2), gptq(symmetric=False, version=2), INT4_ZEROS, f"4 bits in {ZEROS}"
    ),
    "gptq, 8 bits": case(gptq_settings(8, 32), gptq(8, 32), INT8, "8 bits in groups of 32"),
    "gptq, 8 bits, zero points": case(
        gptq_settings(8), gptq(8, symmetric=False), INT8, f"8 bits in {ZEROS}", lost=True
    ),
    "gptq, columns": case(gptq_settings(4, -1), gptq(4, -1), INT4, "4 bits in columns"),
    "gptq, act-order": case(
        gptq_settings(desc_act=True, sym=False), gptq(symmetric=False, act_order=True), INT8,
        f"4 bits in {ZEROS} in another order", lost=True,
    ),
    "gptq, act-order, columns": case(
        gptq_settings(4, -1, desc_act=True), gptq(4, -1, act_order=True), INT4, "4 bits in columns"
    ),
    "w4a16": case(compressed_settings(), compressed(), INT4, "4 bits in groups of 128"),
    "w4a16, zero points": case(
        compressed_settings(symmetric=False), compressed(symmetric=False), INT4_ZEROS, f"4 bits in {ZEROS}"
    ),
    "w4a16, zero points in int8": case(
        compressed_settings(symmetric=False), compressed(symmetric=False, raw_zeros=True), INT4_ZEROS,
        f"4 bits in {ZEROS}",
    ),
    "w4a16, columns": case(
        compressed_settings(strategy="channel", group_size=None), compressed(4, -1), INT4, "4 bits in columns"
    ),
    "w8a16": case(compressed_settings(num_bits=8), compressed(8), INT8, "8 bits in groups of 128"),
    "w8a16, zero points": case(
        compressed_settings(num_bits=8, symmetric=False), compressed(8, symmetric=False), INT8, f"8 bits in {ZEROS}",
        lost=True,
    ),
    "w8a8": case(
        compressed_settings("int-quantized", strategy="channel", **WHOLE), whole_int8(), INT8, "8 bits in columns"
    ),
    "w8a8, one scale": case(
        compressed_settings("naive-quantized", strategy="tensor", **WHOLE), whole_int8(per_tensor=True), INT8,
        "8 bits in columns",
    ),
    "w8a8 of float8, rows": case(
        compressed_settings("float-quantized", strategy="channel", **FLOAT), fp8(None, "weight_scale"), INT8, "FP8",
        lost=True,
    ),
    "w8a8 of float8, one scale": case(
        compressed_settings("naive-quantized", strategy="tensor", **FLOAT), fp8((0, 0), "weight_scale"), INT8, "FP8",
        lost=True,
    ),
    "w8a8 of float8, powers of 2": case(
        compressed_settings("mxfp8-quantized", **FLOAT | {"group_size": 32}), mxfp8, INT8, "FP8", lost=True
    ),
    "mxfp4-pack-quantized": case(
        compressed_settings("mxfp4-pack-quantized", **FP4, group_size=32), mxfp4_packed, MXFP4, "MXFP4"
    ),
    "nvfp4-pack-quantized": case(
        compressed_settings("nvfp4-pack-quantized", **FP4, strategy="tensor_group", group_size=16),
        nvfp4(divides=True), NVFP4, "NVFP4",
    ),
    "modelopt, nvfp4": case(modelopt_settings(), nvfp4(), NVFP4, "NVFP4"),
    "modelopt, nvfp4, experts in one tensor": Case(
        modelopt_settings(), nvfp4(), {NVFP4}, "12 of NVFP4", kind="gpt_oss"
    ),
    "modelopt, fp8": case(
        modelopt_settings("FP8", quant_method=None), fp8((0, 0), "weight_scale"), INT8, "FP8", lost=True
    ),
    "modelopt, fp8, blocks": case(
        modelopt_settings("FP8_PB_WO"), blocks_in_four_dimensions, INT8, "FP8", lost=True
    ),
    "modelopt, nvfp4 in groups of 32": case(modelopt_settings("W4A8_NVFP4_FP8"), nvfp4(32), NVFP4, "NVFP4"),
    "modelopt, fp8, experts in one tensor": Case(
        modelopt_settings("FP8"), fp8_experts, {INT8}, "12 of FP8", lost=True, kind="gpt_oss"
    ),
    "modelopt, mxfp8": case(modelopt_settings("MXFP8"), mxfp8, INT8, "FP8", lost=True),
    "fp8": case(fp8_settings(), fp8(), INT8, "FP8", lost=True),
    "fp8, small blocks": case(fp8_settings((32, 64)), fp8((32, 64)), INT8, "FP8", lost=True),
    "fp8, one scale": case(fp8_settings(None, activation_scheme="static"), fp8((0, 0)), INT8, "FP8", lost=True),
    "nf4": case(nf4_settings(nested=False), nf4(nested=False), INT8, "NF4", lost=True),
    "nf4, nested": case(nf4_settings(nested=True), nf4(nested=True), INT8, "NF4", lost=True),
    "mxfp4": Case(
        {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}, mxfp4, {MXFP4}, "4 of MXFP4", kind="gpt_oss"
    ),
}  # fmt: skip


def load(folder: Path, dtype: str = "auto", **options: Any) -> CpuModel:
    model = load_fast_model(LoadPlan(str(folder), dtype=dtype, **options))
    assert isinstance(model, CpuModel)
    return model


def written(case: Case, folder: Path, kind: str | None = None) -> Any:
    return write_folder(folder, tiny_model(kind or case.kind), case.settings, case.encode)


def logits_of(folder: Path, dtype: str = "float32", **options: Any) -> Tensor:
    return logits_in_chunks(load(folder, dtype, **options), CpuAttention())


@pytest.mark.parametrize("name", sampled(CASES, 6, keep=["awq, groups of 128", "gptq, act-order", "fp8", "mxfp4"]))
def test_equals_generate(name: str, tmp_path: Path) -> None:
    """Guards the numbers of each format: token for token, in float32."""
    network = written(CASES[name], tmp_path / "model")
    assert equals_generate(tmp_path / "model", network, PROMPTS[:5])


@pytest.mark.parametrize("name", sampled(CASES, 6, keep=["awq, groups of 128", "nf4, nested", "mxfp4"], seed=1))
def test_formats(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards where each format goes, that its logits are near those in float32, and that a rounding is told."""
    case = CASES[name]
    network = written(case, tmp_path / "model")
    model = load(tmp_path / "model", activations="bf16")
    assert model.formats == case.formats | {BFLOAT16} and model.dtype == torch.bfloat16
    assert f"matrices: {case.label})" in model.stored
    names = ", ".join(sorted(FORMATS[format] for format in model.formats))
    assert f"({names}), multiplied with bf16 activations" in model.packed
    expected = reference_logits(network, [PROMPT])[0]
    error = typical_error(logits_in_chunks(model, CpuAttention()), expected)
    assert error < (0.04 if case.kind == "qwen3" else 0.4)  # a token of GPT-OSS may get another expert
    said = [record.getMessage() for record in caplog.records if "are rounded to int8" in record.getMessage()]
    assert len(said) == case.lost and all(case.label.partition(" of ")[2] in sentence for sentence in said)


def test_experts_compute(tmp_path: Path) -> None:
    """Guards experts, whose gate and up lie in turns, and parts of a matrix that differ."""
    network = written(CASES["awq, groups of 32"], tmp_path / "model", "qwen3_moe")
    expected = reference_logits(network, [PROMPT])[0]
    assert error_of(logits_of(tmp_path / "model"), expected) < 1e-4
    assert typical_error(logits_of(tmp_path / "model", "auto", activations="bf16"), expected) < 0.2


def test_some_matrices_stay_numbers(tmp_path: Path) -> None:
    """Guards lists of modules that are not converted: what counts is which tensors are there."""
    case = CASES["awq, symmetric"]
    network = write_folder(
        tmp_path / "model",
        tiny_model("llama"),
        case.settings | {"modules_to_not_convert": ["down_proj", "v_proj"]},
        lambda module: None if "down_proj" in module or "1.self_attn.v_proj" in module else case.encode,  # type: ignore[arg-type,return-value]
        by_name=True,
    )
    expected = reference_logits(network, [PROMPT])[0]
    assert error_of(logits_of(tmp_path / "model"), expected) < 1e-4
    model = load(tmp_path / "model", activations="bf16")
    assert model.formats == {BFLOAT16, INT4} and "11 of 4 bits" in model.stored
    assert typical_error(logits_in_chunks(model, CpuAttention()), expected) < 0.04


MIXED = {
    "gptq": (
        gptq_settings(
            dynamic={"-:.*\\.v_proj": {}, r"+:.*\.down_proj": {"bits": 8, "group_size": 64}, "lm_head": {"bits": 8}}
        ),
        gptq(),
        gptq(8, 64),
    ),
    "auto-round": (
        auto_round_settings(
            extra_config={
                ".*v_proj": {"bits": 16, "data_type": "float"},
                "model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 64, "sym": True, "act_bits": 16},
            }
        ),
        gptq(),
        gptq(8, 64),
    ),
    "auto-round, awq": (
        auto_round_settings("auto_round:auto_awq", extra_config={"down_proj": {"group_size": 32}}), awq(), awq(32)
    ),
    "modelopt": (
        modelopt_settings(
            "MIXED_PRECISION",
            quantized_layers={"a": {"quant_algo": "FP8"}, "b": {"quant_algo": "W4A16_NVFP4", "group_size": 16}},
        ),
        nvfp4(),
        fp8((0, 0), "weight_scale"),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", MIXED)
def test_modules_of_their_own_kind(name: str, tmp_path: Path) -> None:
    """Guards rules for some modules: other bits, other groups, another format, or none; the tensors show which."""
    settings, usual, other = MIXED[name]

    def encode(module: str) -> Encoder | None:
        return None if "v_proj" in module else other if "down_proj" in module else usual

    network = write_folder(tmp_path / "model", tiny_model(), settings, encode, by_name=True)
    expected = reference_logits(network, [PROMPT])[0]
    assert error_of(logits_of(tmp_path / "model"), expected) < 1e-4
    assert typical_error(logits_of(tmp_path / "model", "auto", activations="bf16"), expected) < 0.04


HEADS = {
    "gptq": (gptq_settings(lm_head=True), gptq(), INT4),
    "w4a16": (compressed_settings(), compressed(), INT4),
    "modelopt": (modelopt_settings(), nvfp4(), NVFP4),
}


@pytest.mark.parametrize("name", HEADS)
def test_heads_and_embeddings(name: str, tmp_path: Path) -> None:
    """Guards a quantized head, which stays packed, and a quantized embedding beside it."""
    settings, encode, format = HEADS[name]
    also = {"lm_head": encode, "model.embed_tokens": encode}
    network = write_folder(tmp_path / "model", tiny_model(), settings, encode, also=also)
    expected = reference_logits(network, [PROMPT])[0]
    assert error_of(logits_of(tmp_path / "model"), expected) < 1e-4
    model = load(tmp_path / "model", activations="bf16")
    assert model.formats == {format} and "16 of " in model.stored
    assert typical_error(logits_in_chunks(model, CpuAttention()), expected) < 0.04


@pytest.mark.parametrize("names", [("k_scale", "v_scale"), ("k_proj.k_scale", "v_proj.v_scale"), ("kv_scale",)])
def test_scales_of_a_cache(names: tuple[str, ...], tmp_path: Path) -> None:
    """Guards AutoFP8's and ModelOpt's scales of a KV cache, which are left out."""
    settings = fp8_settings(None, activation_scheme="static", kv_cache_scheme="static", ignored_layers=["lm_head"])
    network = write_folder(tmp_path / "model", tiny_model(), settings, fp8((0, 0), "weight_scale"))
    scales = {f"model.layers.{layer}.self_attn.{name}": torch.ones(1) for layer in (0, 1) for name in names}
    change_tensors(tmp_path / "model", lambda tensors: tensors.update(scales))
    assert error_of(logits_of(tmp_path / "model"), reference_logits(network, [PROMPT])[0]) < 1e-4


def test_settings_beside_the_config(tmp_path: Path) -> None:
    """Guards older files of ModelOpt, whose settings are in hf_quant_config.json only."""
    network = written(CASES["modelopt, nvfp4"], tmp_path / "model")
    path = tmp_path / "model" / "config.json"
    config = json.loads(path.read_text())
    del config["quantization_config"]
    path.write_text(json.dumps(config))
    quantization = {
        "quant_algo": "NVFP4",
        "kv_cache_quant_algo": "FP8",
        "group_size": 16,
        "exclude_modules": ["lm_head"],
    }
    beside = {"producer": {"name": "modelopt", "version": "0.23.0"}, "quantization": quantization}
    (tmp_path / "model" / "hf_quant_config.json").write_text(json.dumps(beside))
    assert equals_generate(tmp_path / "model", network, PROMPTS[:2])


def test_transformers_does_not_take_them_for_numbers(tmp_path: Path) -> None:
    """Guards FP8 of a method that transformers skips with a warning: it would leave the scales out."""
    write_folder(tmp_path / "model", tiny_model(), modelopt_settings("FP8"), fp8((0, 0), "weight_scale"))
    change_tensors(tmp_path / "model", lambda tensors: tensors.update({"model.extra": torch.ones(1)}))
    with pytest.raises(
        ModelError, match=r"not read weights of quant_method modelopt; and without .* family: model\.extra"
    ):
        load_model(LoadPlan(str(tmp_path / "model")))


CONFIGS = sorted((Path(__file__).parents[2] / "data" / "configs").glob("*.json"))


def test_published_settings_are_read() -> None:
    """Guards the settings of published models: each of them is understood."""
    configs = {path.stem: json.loads(path.read_text()) for path in CONFIGS}
    read = {
        name: QuantizedCheckpoint(config).name for name, config in configs.items() if settings_of(config) is not None
    }
    assert {"ModelOpt", "FP8", "MXFP4", "compressed-tensors"} <= set(read.values())
    assert read["Qwen--Qwen3-32B-FP8-Static-PerTensor"] == read["nvidia--DeepSeek-V4-Pro-NVFP4"] == "ModelOpt"


def test_experts_in_one_tensor_are_not_read_beside_quantized_matrices(tmp_path: Path) -> None:
    """Guards the reason that is told, where matrices of the others were looked up in a name."""
    written(CASES["awq, groups of 32"], tmp_path / "model", "qwen3_moe")

    def stack(tensors: dict[str, Tensor]) -> None:
        experts = {name for name in tensors if ".mlp.experts." in name}
        for layer in {name.partition(".experts.")[0] for name in experts}:
            tensors[f"{layer}.experts.gate_up_proj"] = torch.zeros(4, 512, 256)
            tensors[f"{layer}.experts.down_proj"] = torch.zeros(4, 256, 256)
        for name in experts:
            del tensors[name]

    change_tensors(tmp_path / "model", stack)
    with pytest.raises(NoFastPath, match="its experts lie in one tensor beside quantized weights"):
        load(tmp_path / "model")


def test_quantize_rounds_anew(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards `--quantize int8` on weights of 4 bits, and what is said of float32."""
    written(CASES["awq, symmetric"], tmp_path / "model")
    assert load(tmp_path / "model", quantize=Quantization("int8")).formats == {INT8}
    assert not caplog.records
    load(tmp_path / "model", "float32")
    assert "The AWQ weights are kept in float32, and take" in caplog.text


def test_biases_of_zeros_are_left_out(tmp_path: Path) -> None:
    """Guards tools that give every matrix a bias, and a bias that is none of zeros."""
    written(CASES["awq, symmetric"], tmp_path / "model")
    expected, name = logits_of(tmp_path / "model"), "model.layers.0.mlp.up_proj.bias"
    change_tensors(tmp_path / "model", lambda tensors: tensors.update({name: torch.zeros(256)}))
    assert torch.equal(logits_of(tmp_path / "model"), expected)
    change_tensors(tmp_path / "model", lambda tensors: tensors.update({name: torch.ones(256)}))
    with pytest.raises(NoFastPath, match=f"unknown in its family: {name}"):
        load(tmp_path / "model")


LAST = "model.layers.1.mlp.down_proj"
NF4_STATE = ".weight.quant_state.bitsandbytes__nf4"
STACK = "model.layers.1.mlp.experts.down_proj"


def cut(end: str, axis: int = 0, name: str = LAST) -> Callable[[dict[str, Tensor]], Any]:
    """Leaves half of a tensor."""
    return lambda tensors: tensors.update({name + end: tensors[name + end].chunk(2, axis)[0].clone()})


def put(end: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({LAST + end: tensor})


def norm(kind: torch.dtype) -> Callable[[dict[str, Tensor]], Any]:
    return lambda tensors: tensors.update({"model.norm.weight": torch.zeros(256, dtype=kind)})


def narrow_all(tensors: dict[str, Tensor]) -> None:
    tensors.update({name: one.chunk(2, 1)[0].clone() for name, one in tensors.items() if LAST in name})


DAMAGES: dict[str, tuple[str, Callable[[dict[str, Tensor]], Any], str]] = {
    "no scales": ("awq", lambda tensors: tensors.pop(LAST + ".scales"), f"its quantized weights lack {LAST}.scales"),
    "few scales": ("awq", cut(".scales", 1), r"scales is F16 [2, 128], and should be F16 or BF16 or F32 [2, 256]"),
    "few zero points": ("awq", cut(".qzeros", 1), "qzeros is I32 [2, 16], and should be I32 [2, 32]"),
    "another type": ("awq", put(".qweight", torch.ones(256, 32)), "is F32 [256, 32], and should be I32 in 2 dim"),
    "another shape": ("awq", narrow_all, f"{LAST}.weight is [128, 256], and its config.json has [256, 256]"),
    "twice": ("awq", put(".weight", torch.ones(256, 256)), "down_proj.weight twice, once quantized"),
    "no numbers": ("awq", put(".qweight", torch.ones(0, 32, dtype=torch.int32)), "should be I32 in 2 dimensions"),
    "integers as scales": ("awq", put(".scales", torch.ones(2, 256, dtype=torch.int16)), "scales is I16 [2, 256]"),
    "float8 that is not quantized": ("awq", norm(torch.float8_e5m2), "is F8_E5M2 [256], which is not quantized"),
    "complex numbers": ("awq", norm(torch.complex64), "norm.weight is C64 [256], which is not quantized"),
    "no order": ("gptq", cut(".g_idx"), "g_idx is I32 [128], and should be I32 or I64 [256]"),
    "a group that is not there": (
        "gptq", put(".g_idx", torch.full((256,), 2, dtype=torch.int32)), "g_idx names groups other than 0 to 1"
    ),
    "zero points of other rows": ("gptq", cut(".qzeros", 1), "qzeros is I32 [2, 16], and should be I32 [2, 32]"),
    "a shape that lies": (
        "w4a16", put(".weight_shape", torch.tensor([256, 2**40])),
        "weight_packed is I32 [256, 32], and should be packed integers of a matrix [256, 1099511627776]",
    ),
    "a negative shape": ("w4a16", put(".weight_shape", torch.tensor([256, -256])), "of a matrix [256, -256]"),
    "scales of other rows": ("w4a16", cut(".weight_scale"), "weight_scale is BF16 [128, 2], and should be"),
    "no shape": ("w4a16", lambda tensors: tensors.pop(LAST + ".weight_shape"), f"lack {LAST}.weight_shape"),
    "few blocks": ("fp8", cut("_scale_inv", 0, LAST + ".weight"), "weight_scale_inv is F32 [1, 2], and should be"),
    "no blocks": ("fp8", lambda tensors: tensors.pop(LAST + ".weight_scale_inv"), f"lack {LAST}.weight_scale_inv"),
    "no map": ("nf4, nested", lambda tensors: tensors.pop(f"{LAST}.weight.quant_map"), f"lack {LAST}.weight.quant_map"),
    "few numbers": ("nf4, nested", put(".weight", torch.zeros(8, 1, dtype=torch.uint8)), "is U8 [8, 1], and should be"),
    "no JSON": ("nf4, nested", lambda tensors: tensors[LAST + NF4_STATE].fill_(0x5B), f"{NF4_STATE} does not say how"),
    "no sizes": ("nf4, nested", put(NF4_STATE, torch.tensor([*b"{}"], dtype=torch.uint8)), "does not say how"),
    "few exponents": ("mxfp4", cut("_scales", 1, STACK), "down_proj_scales is U8 ["),
    "few scales of 16": ("modelopt, nvfp4", cut(".weight_scale", 1), "scale is F8_E4M3 [256, 8], and should be"),
    "no factor": (
        "modelopt, nvfp4", lambda tensors: tensors.pop(LAST + ".weight_scale_2"), "weight_scale is F8_E4M3 [256, 16],",
    ),
    "bytes without scales": ("nvfp4-pack-quantized", lambda tensors: tensors.pop(LAST + ".weight_scale"), "lack"),
    "short blocks": ("mxfp4", cut("_blocks", 3, STACK), "8], and should be U8 ["),
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(DAMAGES, 12, keep=["no JSON", "a shape that lies"]))
def test_damaged_files(name: str, tmp_path: Path) -> None:
    """Guards tensors that are missing, or are not as the format has them: one sentence that names one."""
    case, damage, sentence = DAMAGES[name]
    written(CASES["awq, groups of 128" if case == "awq" else case], tmp_path / "model")
    change_tensors(tmp_path / "model", damage)
    with pytest.raises(ModelError, match=f"^Cannot load {tmp_path}/model: .*{re.escape(sentence)}.*\\.$"):
        load_model(LoadPlan(str(tmp_path / "model")))


def test_groups_beyond_any_row(tmp_path: Path) -> None:
    """Guards the memory and the errors that a size of 10**30 made."""
    write_folder(tmp_path / "model", tiny_model(), awq_settings(10**30), awq())
    with pytest.raises(ModelError, match=r"should be F16 or BF16 or F32 \[1, 256\]"):
        load(tmp_path / "model")


UNREAD = [
    ({"quant_method": "aqlm"}, "weights of quant_method aqlm are not read"),
    ({"quant_method": None}, "weights of quant_method None are not read"),
    (awq_settings(version="gemv"), "awq weights with version = 'gemv' are not read"),
    (awq_settings(bits=8), "awq weights with bits = 8 are not read"),
    (awq_settings(group=0), "awq weights with group_size = 0 are not read"),
    (awq_settings(some_rotation="hadamard"), "awq weights with some_rotation = 'hadamard' are not read"),
    (gptq_settings(3), "gptq weights with bits = 3 are not read"),
    (gptq_settings(checkpoint_format="marlin"), "gptq weights with checkpoint_format = 'marlin' are not read"),
    (gptq_settings(dynamic={"+:.*up.*": {"bits": 2}}), r"with dynamic = {'\+:.\*up.\*': {'bits': 2}} are not read"),
    (
        gptq_settings(dynamic={"up": {"adapter": {"rank": 8}}}),
        "with dynamic = {'up': {'adapter': {'rank': 8}}} are",
    ),
    (gptq_settings(dynamic=["up"]), r"with dynamic = {'dynamic': \['up'\]} are not read"),
    (auto_round_settings("auto_round:llm_compressor"), "auto-round weights with packing_format = 'auto_round:llm_comp"),
    (auto_round_settings(data_type="mx_fp"), "auto-round weights with data_type = 'mx_fp' are not read"),
    (auto_round_settings(extra_config={"up": {"bits": 3}}), "with extra_config = {'up': {'bits': 3}} are not read"),
    (
        auto_round_settings("auto_round:awq", extra_config={"up": {"bits": 8}}),
        "extra_config = {'up': {'bits': 8}}",
    ),
    (awq_settings(w_bit=3), "awq weights with w_bit = 3 are not read"),
    (modelopt_settings("W4A16_AWQ"), "modelopt weights with quant_algo = 'W4A16_AWQ' are not read"),
    (modelopt_settings(moe_quant_algo="W8A16"), "modelopt weights with moe_quant_algo = 'W8A16' are not read"),
    (
        modelopt_settings("MIXED_PRECISION", quantized_layers={"up": {"quant_algo": "NVFP4_AWQ"}}),
        "with quantized_layers = {'up': {'quant_algo': 'NVFP4_AWQ'}} are not read",
    ),
    (compressed_settings(num_bits=2), "compressed-tensors weights with num_bits = 2 are not read"),
    (compressed_settings(num_bits=4, type="float"), "compressed-tensors weights with num_bits = 4 are not read"),
    (compressed_settings(strategy="token"), "compressed-tensors weights with strategy = 'token' are not read"),
    (compressed_settings() | {"transform_config": {"R1": 1}}, "with transform_config = {'R1': 1} are not read"),
    (compressed_settings() | {"sparsity_config": {"format": "sparse-24"}}, "with sparsity_config = {'format': 'sparse"),
    (compressed_settings() | {"config_groups": None}, "with config_groups = None are not read"),
    (fp8_settings(fmt="e5m2"), "fp8 weights with fmt = 'e5m2' are not read"),
    (fp8_settings((128, 0)), r"fp8 weights with weight_block_size = \[128, 0\] are not read"),
    (nf4_settings(nested=True, load_in_4bit=False), "bitsandbytes weights with load_in_4bit = False are not read"),
    ({"quant_method": "mxfp4", "bits": 5}, "mxfp4 weights with bits = 5 are not read"),
]


@pytest.mark.parametrize(("settings", "sentence"), UNREAD, ids=[sentence for _, sentence in UNREAD])
def test_what_is_not_read(settings: dict[str, Any], sentence: str) -> None:
    """Guards methods and options that nobody here has understood: transformers gets them."""
    with pytest.raises(UnsupportedConfig, match=sentence):
        QuantizedCheckpoint(json.loads(json.dumps({"quantization_config": settings})))


def test_both_reasons_are_told(tmp_path: Path) -> None:
    """Guards the sentence for a checkpoint that transformers refuses, too."""
    write_folder(tmp_path / "model", tiny_model(), awq_settings(version="gemv"), awq())
    with pytest.raises(
        ModelError, match="and without transformers awq weights with version = 'gemv' are not"
    ) as caught:
        load_model(LoadPlan(str(tmp_path / "model")))
    assert "\n" not in str(caught.value)


def changed(kind: type[Any], method: str, change: Callable[[Any], Any]) -> Callable[[pytest.MonkeyPatch], None]:
    """A fault: what a reader's method gives is changed."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        original = getattr(kind, method)
        patch.setattr(kind, method, lambda self, rows: change(original(self, rows)))

    return plant


def neighbour(scales: NDArray[Any]) -> NDArray[Any]:
    return np.roll(scales, 1, axis=1)


def swapped(codes: NDArray[Any]) -> NDArray[Any]:
    """Pairs of numbers the other way round, as if the high bits of a byte came first."""
    return codes.reshape(len(codes), -1, 2)[..., ::-1].reshape(codes.shape)


def off_by_one(zeros: NDArray[Any]) -> NDArray[Any]:
    return zeros + 1


def larger_blocks(patch: pytest.MonkeyPatch) -> None:
    original = reader_settings.Headers.block
    patch.setattr(reader_settings.Headers, "block", lambda self, *which: (2 * original(self, *which)[0], 64))


def nested_with(**changes: Any) -> Callable[[pytest.MonkeyPatch], None]:
    """A fault: matrices of bitsandbytes with other attributes than their file says."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        init = NestedMatrix.__init__
        patch.setattr(
            NestedMatrix, "__init__", lambda self, *given: (init(self, *given), vars(self).update(changes))[0]
        )

    return plant


FAULTS: dict[str, tuple[str, Callable[[pytest.MonkeyPatch], Any]]] = {
    "awq, order of a word": ("awq, groups of 32", lambda patch: patch.setattr(awq_reader, "_PLACES", np.arange(8))),
    "awq, zero points": ("awq, groups of 32", changed(AwqMatrix, "zeros", off_by_one)),
    "awq, scales": ("awq, groups of 32", changed(AwqMatrix, "scales", neighbour)),
    "gptq, order of a byte": ("gptq", changed(GptqMatrix, "codes", swapped)),
    "gptq, zero points": ("gptq, zero points", changed(GptqMatrix, "zeros", off_by_one)),
    "gptq, scales": ("gptq", changed(GptqMatrix, "scales", neighbour)),
    "gptq, order": (
        "gptq, act-order",
        lambda patch: patch.setattr(reader_settings.Headers, "order", lambda self, name, *_: self.used.add(name)),
    ),
    "w4a16, order of a byte": ("w4a16", changed(CompressedMatrix, "codes", swapped)),
    "w4a16, zero points": ("w4a16, zero points", changed(CompressedMatrix, "zeros", off_by_one)),
    "w4a16, scales": ("w4a16", changed(CompressedMatrix, "scales", neighbour)),
    "w8a8, integers": ("w8a8", changed(CompressedMatrix, "codes", swapped)),
    "mxfp4, order of a byte": ("mxfp4", changed(Mxfp4Matrix, "codes", swapped)),
    "nvfp4, order of a byte": ("modelopt, nvfp4", changed(Nvfp4Matrix, "codes", swapped)),
    "nvfp4, scales": ("modelopt, nvfp4", changed(Nvfp4Matrix, "scales", neighbour)),
    "mxfp4, exponents": ("mxfp4", changed(Mxfp4Matrix, "scales", neighbour)),
    "fp8, blocks": ("fp8, small blocks", larger_blocks),
    "nf4, blocks": ("nf4, nested", nested_with(block=128)),
    "nf4, offset": ("nf4, nested", nested_with(offset=0.0)),
}  # fmt: skip


@pytest.mark.parametrize("name", sampled(FAULTS, 4, keep=["gptq, order"]))
def test_wrong_numbers_are_seen(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards these tests: a reader that takes a file for what it is not gives other logits, or none, in both ways."""
    case, plant = FAULTS[name]
    network = written(CASES[case], tmp_path / "model")
    expected = reference_logits(network, [PROMPT])[0]
    assert error_of(logits_of(tmp_path / "model"), expected) < 1e-4
    plant(monkeypatch)
    assert error_of(logits_of(tmp_path / "model"), expected) > 0.05
    assert typical_error(logits_of(tmp_path / "model", "auto", activations="bf16"), expected) > 0.1


def test_mxfp4_of_transformers() -> None:
    """Guards the reference of these tests: transformers reads the same numbers from the same bytes."""
    parts, numbers = mxfp4(torch.randn(3, 64, 96, generator=torch.Generator().manual_seed(0)))
    found = _convert_moe_packed_tensors(parts["_blocks"], parts["_scales"], dtype=torch.float32)
    assert torch.equal(found, numbers)


def test_mxfp4_scales_keep_their_powers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards scales that float16 does not have, which other formats are rounded to."""
    matrix = Mxfp4Matrix(cast(Tensors, None), "blocks", 2, 64, "scales", 1, is_transposed=True)
    exponents = np.array([[60, 127], [190, 200]], np.uint8)
    parts = {"blocks": np.full((2, 32), 0x76, np.uint8), "scales": exponents}
    monkeypatch.setattr(Mxfp4Matrix, "_taken", lambda _, name, rows: parts[name][rows])
    found = matrix.integers(np.arange(2), MXFP4)
    assert np.array_equal(found.scales, np.ldexp(1.0, exponents.astype(int) - 128))
    assert np.array_equal(matrix.values(np.arange(2))[:, 32:34], found.scales[:, 1:] * torch.tensor([8, 12]))
