"""Quantized weights on a GPU: they give what transformers gives with the numbers that the files stand for.

Without a GPU, Triton's interpreter runs the kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor

from cbatch.attention.reference import ReferenceAttention
from cbatch.base.params import SamplingParams
from cbatch.base.quantization import Quantization
from cbatch.engine.kernel_checks.layer import LayerChecks
from cbatch.kernels.formats import FORMATS, INT4, INT8, Integers, quantized
from cbatch.kernels.quantized_matrix import QuantizedMatrix
from cbatch.model import device_weights, load_plan, loader, stored
from cbatch.model.formats.gguf import GgufModel
from cbatch.model.load_plan import LoadPlan
from cbatch.model.ops.device_kernel import by_torch
from tests.support.cuda_model import engine_around
from tests.support.device import DEVICE
from tests.support.generation import generate
from tests.support.gguf_files import gguf_model, write_model
from tests.support.kernel_faults import replace_kernel
from tests.support.model_checks import PROMPTS, is_greedy_output, reference_logits
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
    mxfp4,
    tiny_model,
    write_folder,
)
from tests.support.samples import sampled

pytest.importorskip("triton", reason="the kernels for a GPU need Triton")

from cbatch.attention.triton import TritonAttention
from cbatch.model.cuda import CudaModel

pytestmark = pytest.mark.kernels

TOKENS, CHUNKS = PROMPT[:24], [0, 20, 21, 24]
"""A prompt, and where it is cut into steps."""


@pytest.fixture(autouse=True)
def loaded_as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (stored, load_plan):
        monkeypatch.setattr(module, "is_accelerator", lambda _: True)


def load_file(path: Path, dtype: str = "float32", quantize: Quantization | None = None) -> CudaModel:
    model = GgufModel([path]).load(LoadPlan(device=DEVICE, dtype=dtype, quantize=quantize))
    assert isinstance(model, CudaModel)
    return model


def load_folder(folder: Path, dtype: str = "float32", quantize: Quantization | None = None) -> CudaModel:
    model = loader.load_fast_model(LoadPlan(str(folder), device=DEVICE, dtype=dtype, quantize=quantize))
    assert isinstance(model, CudaModel)
    return model


def logits_of(model: CudaModel) -> Tensor:
    return logits_in_chunks(model, TritonAttention(DEVICE), TOKENS, CHUNKS)


def logits_by_torch(model: CudaModel) -> Tensor:
    return logits_in_chunks(model.with_ops(by_torch()), ReferenceAttention(), TOKENS, CHUNKS)


def expected_of(network: Any) -> Tensor:
    return reference_logits(network, [TOKENS])[0]


def kinds_of(model: CudaModel) -> set[str]:
    """The formats of its matrices; routers are always numbers."""
    matrices = model._on_device.weights.matrices
    return {FORMATS[matrix.format] for matrix in matrices if isinstance(matrix, QuantizedMatrix)}


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


@pytest.mark.parametrize("name", sampled(FILES, 3, keep=["IQ4_NL", "mixed, experts with biases"]))
def test_gguf_files(name: str, tmp_path: Path) -> None:
    """Guards weights of GGUF files, embeddings, heads and experts, in float32 and rounded to float16."""
    kind, formats, expected_kinds = FILES[name]
    path = tmp_path / "model.gguf"
    expected = expected_of(write_model(path, gguf_model(kind), formats))
    model = load_file(path)
    assert kinds_of(model) == expected_kinds
    found = logits_of(model)
    assert error_of(found, logits_by_torch(model)) < 2e-4
    assert error_of(found, expected) < (0.05 if "int4_zeros" in expected_kinds else 2e-4)  # zero points are rounded
    half = load_file(path, "float16")
    assert half.dtype == torch.float16 and kinds_of(half) == expected_kinds
    assert typical_error(logits_of(half), expected) < (0.4 if "moe" in kind or "oss" in kind else 0.02)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_gguf_equals_generate(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards whole runs, token for token: rows that decode beside chunks of prompts."""
    path = tmp_path / "model.gguf"
    network = write_model(path, gguf_model(kind), mixed)
    engine = engine_around(monkeypatch, load_file(path), max_batch_tokens=24, block_size=16)
    outputs = generate(engine, PROMPTS[:3], SamplingParams(max_tokens=4, ignore_eos=True))
    assert all(
        is_greedy_output(network, prompt, list(out.token_ids)) for prompt, out in zip(PROMPTS, outputs, strict=False)
    )


FOLDERS: dict[str, tuple[dict[str, Any], Encoder, set[str], str]] = {
    "awq": (awq_settings(), awq(), {"int4_zeros"}, "qwen3"),
    "gptq": (gptq_settings(), gptq(), {"int4"}, "qwen3"),
    "gptq, in another order": (
        gptq_settings(desc_act=True, sym=False), gptq(symmetric=False, act_order=True), {"int8"}, "llama"
    ),
    "awq, experts": (awq_settings(32), awq(32), {"int4_zeros"}, "qwen3_moe"),
    "w4a16": (compressed_settings(), compressed(), {"int4"}, "qwen3"),
    "w8a16": (compressed_settings(num_bits=8), compressed(8), {"int8"}, "qwen3"),
    "fp8": (fp8_settings(), fp8(), {"fp8"}, "qwen3"),
    "fp8, small blocks": (fp8_settings((32, 64)), fp8((32, 64)), {"fp8"}, "qwen3"),
    "fp8, one scale": (fp8_settings(None), fp8((0, 0)), {"fp8"}, "llama"),
    "w8a8 of float8, rows": (
        compressed_settings("float-quantized", strategy="channel", num_bits=8, type="float", group_size=None),
        fp8(None, "weight_scale"), {"fp8"}, "qwen3",
    ),
    "mxfp4": ({"quant_method": "mxfp4"}, mxfp4, {"mxfp4"}, "gpt_oss"),
}  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", sampled(FOLDERS, 5, keep=["fp8", "mxfp4", "gptq, in another order"]))
def test_folders(name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards checkpoints of every kind: what a GPU gets is what the files have, or what they are rounded to.

    Kernels run those formats of which there are no GGUF files (see above); torch multiplies with the others.
    """
    settings, encode, expected_kinds, kind = FOLDERS[name]
    network = write_folder(tmp_path / "model", tiny_model(kind), settings, encode)
    model = load_folder(tmp_path / "model")
    assert kinds_of(model) == expected_kinds and "bits a weight" in model.stored
    assert ("are rounded to int8" in caplog.text) == ("order" in name)
    found = logits_of(model) if name in ("fp8", "mxfp4") else logits_by_torch(model)
    assert error_of(found, expected_of(network)) < (0.2 if "order" in name else 2e-4)


@pytest.mark.parametrize("weights", ["int8", "int4"])
@pytest.mark.parametrize("kind", ["qwen2", "gemma2", "mixtral"])
def test_quantize(kind: str, weights: str) -> None:
    """Guards `--quantize`: every matrix is rounded as on a CPU, the head and an embedding that is the head to int8."""
    saved = saved_model(kind)
    quantize = Quantization(weights)
    model = CudaModel(saved.config, saved.tensors, torch.float32, DEVICE, quantize=quantize)
    assert kinds_of(model) == {"int8", weights}

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


def test_kernels_check_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what an engine does when it starts on a GPU: each product is compared with torch's, also the head's."""
    for kind in ("qwen3", "mixtral"):
        saved = saved_model(kind)
        quantize = Quantization("int4")
        model = CudaModel(saved.config, saved.tensors, torch.float32, DEVICE, quantize=quantize)
        checks = list(LayerChecks(model, 16).run())
        assert not [check.name for check in checks if not check.agrees]
        assert {"quantized_linear", "output head"} <= {check.name for check in checks}
        with monkeypatch.context() as patch:
            replace_kernel(patch, "quantized_linear", lambda right, source, *others: right(2 * source, *others))
            assert "quantized_linear" in {check.name for check in LayerChecks(model, 16).run() if not check.agrees}


def test_quantize_rounds_files_anew(tmp_path: Path) -> None:
    """Guards `--quantize int8` on weights that are integers of 4 bits in a folder, and in a GGUF file."""
    settings, encode, _, kind = FOLDERS["gptq"]
    write_folder(tmp_path / "model", tiny_model(kind), settings, encode)
    write_model(tmp_path / "model.gguf", gguf_model("llama"), Kind.Q4_0)
    for model in (
        load_folder(tmp_path / "model", quantize=Quantization("int8")),
        load_file(tmp_path / "model.gguf", quantize=Quantization("int8")),
    ):
        assert kinds_of(model) == {"int8"} and str(model.quantization) == "int8 with float32 activations"


def test_weights_keep_their_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards memory: packed weights are as large as the file, and no more of a matrix is unpacked than a part."""
    monkeypatch.setattr(device_weights, "_NUMBERS_AT_ONCE", 2048)
    path = tmp_path / "model.gguf"
    write_model(path, gguf_model("qwen3"), Kind.Q4_0)
    most = 0
    packed = QuantizedMatrix.fill

    def noted(self: QuantizedMatrix, first: int, integers: Integers) -> None:
        nonlocal most
        most = max(most, integers.numbers.numel())
        packed(self, first, integers)

    monkeypatch.setattr(QuantizedMatrix, "fill", noted)
    model = load_file(path)
    assert most <= 2048
    assert model.weight_bytes < 1.3 * sum(tensor.data.nbytes for tensor in GgufModel([path])._file.tensors.values())
    assert model.linear_cost.weight_bytes < model.num_parameters
