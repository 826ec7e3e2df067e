"""Quantized weights on a GPU: they give what transformers gives with the numbers that the files stand for.

With `--activations fp8`: which matrices get it, and what is said of the others.

Without a GPU, Triton's interpreter runs the kernels.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from cbatch.attention.reference import ReferenceAttention
from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError
from cbatch.base.quantization import Quantization
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.kernels.formats import FORMATS, INT4, INT8, Integers, quantized
from cbatch.kernels.quantized_matrix import Float8Matrix, QuantizedMatrix
from cbatch.kernels.triton.occupancy import CHIPS
from cbatch.model import device_weights, float8, load_plan, loader, stored
from cbatch.model.float8 import float8_problem, tell_float8
from cbatch.model.formats.gguf import GgufModel
from cbatch.model.hf.adapter import TransformersModel
from cbatch.model.load_plan import LoadPlan
from cbatch.model.ops.device_kernel import by_torch
from cbatch.model.ops.shards import Part
from cbatch.runtime.process_group import ProcessGroup
from tests.support.device import DEVICE, HAS_GPU
from tests.support.float8 import needs_float8
from tests.support.gguf_files import gguf_model, write_model
from tests.support.model_checks import reference_logits
from tests.support.process_groups import together
from tests.support.programs import PROMPT, error_of, logits_in_chunks, saved_model, typical_error
from tests.support.quantized_folders import (
    Encoder,
    awq,
    awq_settings,
    compressed,
    compressed_settings,
    fp8,
    fp8_settings,
    gptq,
    gptq_settings,
    modelopt_settings,
    mxfp4,
    nvfp4,
    tiny_model,
    write_folder,
)
from tests.support.samples import sampled
from tests.support.tiny_models import make_network

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

from cbatch.attention.triton import TritonAttention
from cbatch.model import cuda
from cbatch.model.cuda import CudaModel

pytestmark = pytest.mark.kernels

TOKENS, CHUNKS = PROMPT[:24], [0, 20, 21, 24]
"""A prompt, and where it is cut into steps."""


@pytest.fixture(autouse=True)
def loaded_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (stored, load_plan):
        monkeypatch.setattr(module, "is_accelerator", lambda _: True)
    yield
    float8_problem.cache_clear()  # of chips that a test has made up


def load_file(path: Path, dtype: str = "float32", quantize: Quantization | None = None) -> CudaModel:
    model = GgufModel([path]).load(LoadPlan(device=DEVICE, dtype=dtype, quantize=quantize))
    assert isinstance(model, CudaModel)
    return model


def load_folder(folder: Path, dtype: str = "float32", **options: Any) -> CudaModel:
    model = loader.load_fast_model(LoadPlan(str(folder), device=DEVICE, dtype=dtype, **options))
    assert isinstance(model, CudaModel)
    return model


def logits_of(model: CudaModel) -> Tensor:
    return logits_in_chunks(model, TritonAttention(DEVICE), TOKENS, CHUNKS)


def logits_by_torch(model: CudaModel) -> Tensor:
    return logits_in_chunks(model.with_ops(by_torch()), ReferenceAttention(), TOKENS, CHUNKS)


def expected_of(network: Any) -> Tensor:
    return reference_logits(network, [TOKENS])[0]


def kinds_of(model: CudaModel) -> list[str]:
    """Formats of its matrices, if they are not numbers."""
    matrices = model._on_device.weights.matrices
    return [
        "float8" if isinstance(matrix, Float8Matrix) else FORMATS[matrix.format]
        for matrix in matrices
        if not isinstance(matrix, Tensor)
    ]


def mixed(name: str) -> Kind:
    """As llama.cpp mixes formats: parts of one matrix differ, but both have the integers of one of them."""
    if "attn_v" in name or name.startswith("output"):
        return Kind.Q8_0
    if "attn" in name or "ffn_up" in name:
        return Kind.Q4_0
    return Kind.BF16 if "ffn_down" in name else Kind.Q4_1


FILES: dict[str, tuple[str, Any, set[str]]] = {
    "Q8_0": ("llama", Kind.Q8_0, {"int8"}),
    "Q4_0": ("qwen3", Kind.Q4_0, {"int4"}),
    "Q4_1": ("gemma3_text", Kind.Q4_1, {"int4_zeros"}),
    "IQ4_NL": ("llama", Kind.IQ4_NL, {"int8"}),
    "mixed": ("qwen3", mixed, {"int8", "int4", "int4_zeros"}),
    "mixed, experts": ("qwen3_moe", mixed, {"int8", "int4", "int4_zeros"}),
    "mixed, experts with biases": ("gpt_oss", mixed, {"int8", "int4", "int4_zeros"}),
}


@pytest.mark.parametrize("name", sampled(FILES, 2, keep=["mixed, experts with biases"]))
def test_gguf_files(name: str, tmp_path: Path) -> None:
    """Guards weights of GGUF files, embeddings, heads and experts, in float32 and rounded to float16."""
    kind, formats, expected_kinds = FILES[name]
    path = tmp_path / "model.gguf"
    expected = expected_of(write_model(path, gguf_model(kind), formats))
    model = load_file(path)
    assert set(kinds_of(model)) == expected_kinds
    found = logits_of(model)
    assert error_of(found, logits_by_torch(model)) < 2e-4
    assert error_of(found, expected) < (0.05 if "int4_zeros" in expected_kinds else 2e-4)  # zero points are rounded
    half = load_file(path, "float16")
    assert half.dtype == torch.float16 and set(kinds_of(half)) == expected_kinds
    assert typical_error(logits_of(half), expected) < (0.4 if "moe" in kind or "oss" in kind else 0.02)


FOLDERS: dict[str, tuple[dict[str, Any], Encoder, set[str], str]] = {
    "gptq": (gptq_settings(), gptq(), {"int4"}, "qwen3"),
    "gptq, in another order": (
        gptq_settings(desc_act=True, sym=False), gptq(symmetric=False, act_order=True), {"int8"}, "llama"
    ),
    "awq, experts": (awq_settings(32), awq(32), {"int4_zeros"}, "qwen3_moe"),
    "w4a16": (compressed_settings(), compressed(), {"int4"}, "qwen3"),
    "fp8": (fp8_settings(), fp8(), {"fp8"}, "qwen3"),
    "fp8, small blocks": (fp8_settings((32, 64)), fp8((32, 64)), {"fp8"}, "qwen3"),
    "w8a8 of float8, rows": (
        compressed_settings("float-quantized", strategy="channel", num_bits=8, type="float", group_size=None),
        fp8(None, "weight_scale"), {"fp8"}, "qwen3",
    ),
    "mxfp4": ({"quant_method": "mxfp4"}, mxfp4, {"mxfp4"}, "gpt_oss"),
    "nvfp4": (modelopt_settings(), nvfp4(), {"nvfp4"}, "gpt_oss"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(FOLDERS, 3, keep=["nvfp4", "gptq, in another order"]))
def test_folders(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards checkpoints of every kind: what a GPU gets is what the files have, or what they are rounded to.

    Kernels run those formats of which there are no GGUF files (see above); torch multiplies with the others.
    """
    settings, encode, expected_kinds, kind = FOLDERS[name]
    network = write_folder(tmp_path / "model", tiny_model(kind), settings, encode)
    model = load_folder(tmp_path / "model")
    assert set(kinds_of(model)) == expected_kinds and "bits a weight" in model.stored
    assert ("are rounded to int8" in caplog.text) == ("order" in name)
    found = logits_of(model) if name in ("fp8", "mxfp4", "nvfp4") else logits_by_torch(model)
    assert error_of(found, expected_of(network)) < {"gptq, in another order": 0.2, "nvfp4": 2e-2}.get(name, 2e-4)


@pytest.mark.parametrize("name", FOLDERS)
def test_parts_of_folders(name: str, tmp_path: Path) -> None:
    """Guards groups of numbers with one scale that two processes separate, in every format that keeps its integers."""
    settings, encode, _, kind = FOLDERS[name]
    write_folder(tmp_path / "model", tiny_model(kind), settings, encode)
    whole = load_folder(tmp_path / "model")

    def run(group: ProcessGroup) -> tuple[set[str], Tensor]:
        part = load_folder(tmp_path / "model", part=Part(group.rank, group.size)).in_group(group)
        return set(kinds_of(part)), logits_by_torch(part)

    for kinds, logits in together(2, run):
        assert kinds == set(kinds_of(whole)) and typical_error(logits, logits_by_torch(whole)) < 1e-5


@pytest.mark.parametrize("way", sampled(product(["qwen2", "gemma2", "mixtral"], ["int8", "int4"]), 3), ids=str)
def test_quantize(way: tuple[str, str]) -> None:
    """Guards `--quantize`: every matrix is rounded as on a CPU, the head and an embedding that is the head to int8."""
    kind, weights = way
    saved = saved_model(kind)
    quantize = Quantization(weights)
    model = CudaModel(saved.config, saved.tensors, torch.float32, DEVICE, quantize=quantize)
    assert set(kinds_of(model)) == {"int8", weights}

    def rounded(name: str, tensor: Tensor) -> Tensor:
        is_head = "lm_head" in name or ("embed" in name and model.program.is_tied)
        if not (is_head or "proj" in name or "experts" in name) or tensor.dim() < 2:
            return tensor
        format = INT4 if weights == "int4" and not is_head else INT8
        parts = [quantized(matrix, format).values(format) for matrix in (tensor if tensor.dim() == 3 else [tensor])]
        return torch.stack(parts) if tensor.dim() == 3 else parts[0]

    tensors = {name: rounded(name, tensor) for name, tensor in saved.tensors.items()}
    plain = CudaModel(saved.config, tensors, torch.float32, DEVICE, by_torch())
    assert error_of(logits_of(model), logits_by_torch(plain)) < 2e-4
    assert model.weight_bytes < plain.weight_bytes


def test_quantize_rounds_files_anew(tmp_path: Path) -> None:
    """Guards `--quantize int8` on weights that are integers of 4 bits in a folder, and in a GGUF file."""
    settings, encode, _, kind = FOLDERS["gptq"]
    write_folder(tmp_path / "model", tiny_model(kind), settings, encode)
    write_model(tmp_path / "model.gguf", gguf_model("llama"), Kind.Q4_0)
    for model in (
        load_folder(tmp_path / "model", quantize=Quantization("int8")),
        load_file(tmp_path / "model.gguf", quantize=Quantization("int8")),
    ):
        assert set(kinds_of(model)) == {"int8"} and str(model.quantization) == "int8 with float32 activations"


def test_weights_keep_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards memory, and where parts go: weights are as large as the file, and a matrix is unpacked part by part."""
    monkeypatch.setattr(device_weights, "_NUMBERS_AT_ONCE", 2048)
    path = tmp_path / "model.gguf"
    network = write_model(path, gguf_model("qwen3"), Kind.Q4_0)
    most = 0
    packed = QuantizedMatrix.fill

    def noted(self: QuantizedMatrix, first: int, integers: Integers) -> None:
        nonlocal most
        most = max(most, integers.numbers.numel())
        packed(self, first, integers)

    monkeypatch.setattr(QuantizedMatrix, "fill", noted)
    model = load_file(path)
    assert most <= 2048 and error_of(logits_by_torch(model), expected_of(network)) < 2e-4
    assert model.weight_bytes < 1.3 * sum(tensor.data.nbytes for tensor in GgufModel([path]).file.tensors.values())
    assert model.linear_cost.weight_bytes < model.num_parameters


SMALL = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
ROWS = (
    compressed_settings("float-quantized", strategy="channel", num_bits=8, type="float", group_size=None),
    fp8(None, "weight_scale"),
)
TENSORS, BLOCKS = (fp8_settings(None), fp8((0, 0))), (fp8_settings((32, 32)), fp8((32, 32)))


def load(folder: Path, dtype: str = "float16", **options: Any) -> CudaModel:
    return load_folder(folder, dtype, **{"activations": "fp8"} | options)


def folder_of(path: Path, kind: str, format: tuple[dict[str, Any], Encoder], **sizes: Any) -> Path:
    write_folder(path / "model", tiny_model(kind, **SMALL | sizes), *format)
    return path / "model"


def line_of(model: Any, caplog: pytest.LogCaptureFixture) -> str:
    """The line that an engine would say of the model, with its level."""
    caplog.clear()
    with caplog.at_level(logging.INFO, "cbatch"):
        tell_float8(model)
    [record] = caplog.records
    return f"{record.levelname}: {record.getMessage()}"


@contextmanager
def rounded_inputs(network: Any) -> Iterator[None]:
    """The network with what goes into its quantized linears rounded to e4m3, each row by its largest number."""

    def rounded(_: Any, arguments: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        rows = arguments[0]
        scales = rows.abs().amax(-1, keepdim=True) / 448
        return ((rows / scales).to(torch.float8_e4m3fn).float() * scales, *arguments[1:])

    linears = [module for name, module in network.named_modules() if name.endswith("_proj")]
    hooks = [module.register_forward_pre_hook(rounded) for module in linears]
    yield
    for hook in hooks:
        hook.remove()


@needs_float8
@pytest.mark.skipif(HAS_GPU, reason="only a CPU has products of FP8 in float32, in which the test is sharp")
@pytest.mark.parametrize(("kind", "format"), [("qwen3", ROWS), ("qwen2", TENSORS)])
def test_a_whole_model_in_float32(
    kind: str, format: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards scales for rows and for tensors, fused matrices and biases: logits are those of transformers with rows
    that are rounded, and not those without."""
    monkeypatch.setattr(cuda, "float8_problem", lambda *_: "")
    network = write_folder(tmp_path / "model", tiny_model(kind, **SMALL), *format)
    model = load(tmp_path / "model", "float32")
    assert set(kinds_of(model)) == {"float8"}
    count = len(kinds_of(model))
    assert line_of(model, caplog) == f"INFO: Activations are rounded to fp8 for all {count} FP8 matrices."
    with rounded_inputs(network):
        expected = expected_of(network)
    exact, found = expected_of(network), logits_of(model)
    plain = logits_by_torch(model)
    assert typical_error(found, expected) < 0.01 < typical_error(found, exact)
    assert typical_error(plain, expected) < 0.01


@needs_float8
@pytest.mark.parametrize(
    ("kind", "format", "sizes", "kinds", "line"),
    [
        ("qwen3", BLOCKS, {}, {"fp8"}, "none of 8 FP8 matrices, and stay float16 for 8 with scales for blocks."),
        (
            "llama", TENSORS, {"intermediate_size": 104}, {"float8", "fp8"},
            "6 of 8 FP8 matrices, and stay float16 for 2 whose sizes are no multiples of 16.",
        ),
        ("qwen3_moe", ROWS, {}, {"float8", "fp8"}, "4 of 20 FP8 matrices, and stay float16 for 16 of experts."),
    ],
)  # fmt: skip
def test_others_keep_their_activations(
    kind: str, format: Any, sizes: Any, kinds: set[str], line: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards FP8 matrices without such products: they keep Triton's, and a line says which they are."""
    model = load(folder_of(tmp_path, kind, format, **sizes))
    assert set(kinds_of(model)) == kinds
    assert line_of(model, caplog) == f"WARNING: Activations are rounded to fp8 for {line}"
    assert str(model.quantization) == f"stored with {'fp8' if 'float8' in kinds else 'float16'} activations"
    assert bool(logits_of(model).isfinite().all())


def test_no_matrix_is_fp8(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards the line for models without FP8 weights: integers of files, those of `--quantize`, and none."""
    saved = saved_model("qwen3")
    models = [
        load(folder_of(tmp_path, "qwen3", (awq_settings(32), awq(32)))),
        CudaModel(saved.config, saved.tensors, torch.float16, DEVICE, quantize=Quantization("int8", "fp8")),
        CudaModel(saved.config, saved.tensors, torch.float16, DEVICE),
    ]
    for model in models:
        assert line_of(model, caplog) == "WARNING: None of the model's matrices is FP8, so activations stay float16."
        assert "fp8" not in str(model.quantization)


def test_chips_without_fp8(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Guards chips before 8.9, and those for which torch has no such product: a line says why, and Triton's products
    are used. In float32 there are none either."""
    folder, expected = folder_of(tmp_path, "qwen3", ROWS), "WARNING: Activations stay float16 for all 8 FP8 matrices: "

    def refused(*_: Any, **__: Any) -> None:
        raise RuntimeError("CUDA error: CUBLAS_STATUS_NOT_SUPPORTED when calling `cublasLtMatmulAlgoGetHeuristic(...)`")

    with monkeypatch.context() as patch:
        patch.setattr(float8, "device_limits", lambda _: CHIPS[86])
        float8_problem.cache_clear()
        model = load(folder)
        assert set(kinds_of(model)) == {"fp8"} and str(model.quantization) == "stored with float16 activations"
        assert line_of(model, caplog).startswith(expected)
        assert "has no matrix units for FP8, which came with compute capability 8.9" in line_of(model, caplog)
    with monkeypatch.context() as patch:
        patch.setattr(torch, "_scaled_mm", refused)
        float8_problem.cache_clear()
        model = load(folder)
        assert set(kinds_of(model)) == {"fp8"} and line_of(model, caplog).startswith(expected)
        assert "a scale for each row there (CUDA error: CUBLAS_STATUS_NOT_SUPPORTED" in line_of(model, caplog)
    float8_problem.cache_clear()
    line = line_of(load(folder, "float32"), caplog)
    assert "Activations stay float32 for all 8 FP8 matrices: the model computes in float32" in line


def test_devices_without_the_fast_path(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Guards a CPU, where products of integers take int8 instead, and models of transformers on any GPU."""
    network = TransformersModel(make_network("llama"))
    assert line_of(network, caplog).startswith("WARNING: Activations are not rounded to fp8, which is for NVIDIA GPUs")
    with monkeypatch.context() as patch:
        patch.setattr(float8, "is_accelerator", lambda _: True)
        line = line_of(network, caplog)
    assert line == "WARNING: Activations stay float32: only the fast path of an NVIDIA GPU rounds them to fp8."
    monkeypatch.undo()
    for quantize in (None, Quantization("int8", "fp8")):
        _, chosen = LoadPlan(dtype="bfloat16", quantize=quantize, activations="fp8").formats(
            "bfloat16", is_quantized=True
        )
        assert chosen is not None and chosen.activations == "int8"
    for config in (EngineConfig(activations="fp8", quantize="int8"), EngineConfig(quantize="int8")):
        caplog.clear()
        with SteppingEngine(replace(config, device="cpu", kv_blocks=8, max_seqs=2)) as engine:
            assert str(engine.model.quantization) == "int8 with int8 activations"
        assert ("which is for NVIDIA GPUs" in caplog.text) == (config.activations == "fp8")
    with pytest.raises(ConfigError, match="cannot be rounded to 'fp4'; choose one of: int8, bf16, fp8"):
        SteppingEngine(EngineConfig(activations="fp4", device="cpu"))
