"""Rounding to 4 bits by what goes through a model, and the folders that `cbatch quantize` writes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from cbatch.attention.cpu import CpuAttention
from cbatch.base.errors import ConfigError
from cbatch.base.quantization import Quantization
from cbatch.cli.main import run_command
from cbatch.kernels.formats import INT4, INT4_ZEROS, INT8, quantized
from cbatch.model.cpu import CpuModel
from cbatch.model.load_plan import LoadPlan
from cbatch.model.loader import load_fast_model
from cbatch.model.quantize import write_quantized
from cbatch.model.rounding import calibration, error_feedback
from cbatch.model.rounding.calibration import calibrated
from cbatch.model.rounding.error_feedback import rounded_to_4_bits
from cbatch.model.tensor_files import Tensors
from tests.support.programs import PROMPT, SavedModel, logits_in_chunks, saved_model
from tests.support.quantized_folders import tiny_model

pytestmark = pytest.mark.kernels

CPU = torch.device("cpu")
INT4_WEIGHTS = Quantization("int4", "bf16")


def folder_of(path: Path, saved: SavedModel) -> Path:
    path.mkdir()
    (path / "config.json").write_text(json.dumps(saved.config))
    tensors = {name: tensor.bfloat16().contiguous() for name, tensor in saved.tensors.items()}
    save_file(tensors, path / "model.safetensors", {"format": "pt"})
    return path


def model_in(folder: Path, quantize: Quantization | None = INT4_WEIGHTS) -> CpuModel:
    model = load_fast_model(LoadPlan(str(folder), quantize=quantize, activations="bf16"))
    assert isinstance(model, CpuModel)
    return model


def integers_in(folder: Path, ids: list[int]) -> dict[str, Any]:
    tensors = Tensors(folder)
    weights = calibrated(json.loads((folder / "config.json").read_text()), tensors, CPU, ids)
    assert weights is not None
    parts = {part.name for part in weights._parts}
    return {name: weights.integers_of(name) for name in sorted(parts)}


def test_feedback_makes_products_more_exact_than_rounding() -> None:
    """Errors that are not taken off later numbers, or by the moments of other rows, make products less exact."""
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(40, 100, generator=generator)
    rows = torch.randn(600, 40, generator=generator) @ mixed + torch.randn(600, 100, generator=generator) / 4
    weight = torch.randn(70, 100, generator=generator)

    def error(integers: Any, format: int) -> float:
        return float((rows @ (integers.values(format) - weight).T).square().mean())

    moments = rows.T @ rows
    searched = error(rounded_to_4_bits(weight, None), INT4_ZEROS)
    assert searched < 0.9 * error(quantized(weight, INT4), INT4)
    assert error(rounded_to_4_bits(weight, moments), INT4_ZEROS) < 0.6 * searched


def test_weights_that_never_matter_are_rounded() -> None:
    """A column that only ever met zeros made the moments singular, and a group of zeros a scale of none."""
    rows, weight = torch.randn(64, 64), torch.randn(8, 64)
    rows[:, 3], weight[:, :32] = 0, 0
    found = rounded_to_4_bits(weight, rows.T @ rows).values(INT4_ZEROS)
    assert found.isfinite().all() and not found[:, :32].any()
    assert (found - weight).abs().max() < 2


@pytest.mark.parametrize("kind", ["llama", "gpt2", "phi3", "mixtral", "qwen3_next", "gemma2", "falcon_h1"])
def test_any_family_is_rounded(kind: str, tmp_path: Path) -> None:
    """A family whose linears, experts or recurrent layers the calibration cannot run would not load with int4."""
    saved = saved_model(kind)
    folder = folder_of(tmp_path / "model", saved)
    model = model_in(folder)
    found, expected = (logits_in_chunks(one, CpuAttention()) for one in (model, model_in(folder, None)))
    assert torch.nn.functional.cosine_similarity(found, expected, dim=-1).mean() > 0.89


@pytest.mark.parametrize("kind", ["llama", "qwen3_next"])
def test_result_does_not_depend_on_threads(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replicas have other numbers of threads, and must round a model to the same integers; recurrent layers did not."""
    saved = tiny_model(intermediate_size=2304) if kind == "llama" else saved_model(kind)
    folder = folder_of(tmp_path / "model", saved)
    ids = np.random.default_rng(1).integers(0, 80, 1100).tolist()
    found, before = [], torch.get_num_threads()
    for threads in (1, 3):
        monkeypatch.setattr(error_feedback, "num_threads", lambda threads=threads: threads)
        torch.set_num_threads(threads)
        found.append(integers_in(folder, ids))
    torch.set_num_threads(before)
    alone, together = found
    for name, integers in together.items():
        assert all(map(torch.equal, integers, alone[name])), name


def test_memory_that_runs_out_leaves_a_search(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A device without memory for a step of float32 ended the start."""

    def run_through(*_: Any) -> None:
        raise MemoryError

    monkeypatch.setattr(calibration, "run_through", run_through)
    folder = folder_of(tmp_path / "model", tiny_model())
    found = integers_in(folder, [])
    assert "without trying" in caplog.text
    name = "model.layers.1.mlp.down_proj.weight"
    weight = Tensors(folder)[name].float()
    assert all(map(torch.equal, found[name], rounded_to_4_bits(weight, None)))


@pytest.mark.parametrize("weights", ["int4", "int8"])
@pytest.mark.parametrize("tied", [True, False])
def test_folder_gives_the_bits_of_the_option(weights: str, tied: bool, tmp_path: Path) -> None:
    """A folder that is written and read must hold the integers that the option makes, the head's too."""
    saved = tiny_model(tie_word_embeddings=tied)
    folder = folder_of(tmp_path / "model", saved)
    quantize = Quantization(weights, "bf16")
    plan = LoadPlan(str(folder), quantize=quantize)
    write_quantized(plan, tmp_path / "written")
    read = model_in(tmp_path / "written", None)
    expected = model_in(folder, quantize)
    assert read.formats == expected.formats == ({INT8, INT4_ZEROS} if weights == "int4" else {INT8})
    assert torch.equal(*(logits_in_chunks(one, CpuAttention()) for one in (read, expected)))


def test_compressed_tensors_reads_what_is_written(tmp_path: Path) -> None:
    """Words, zero points or settings that its package takes otherwise would give others another model."""
    pytest.importorskip("compressed_tensors", reason="needs the package compressed-tensors")
    from transformers import AutoModelForCausalLM, CompressedTensorsConfig

    saved = tiny_model()
    folder = folder_of(tmp_path / "model", saved)
    write_quantized(LoadPlan(str(folder), quantize=INT4_WEIGHTS), tmp_path / "written")
    unpacked = CompressedTensorsConfig(run_compressed=False)  # else it refuses zero points, its package's own, too
    network = AutoModelForCausalLM.from_pretrained(
        tmp_path / "written", dtype=torch.float32, quantization_config=unpacked
    )
    with torch.inference_mode():
        found = network(torch.tensor([PROMPT])).logits[0]
    expected = logits_in_chunks(load_fast_model(LoadPlan(str(tmp_path / "written"), dtype="float32")), CpuAttention())
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3)


def test_shards_and_refusals(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Weights in several files are found by their index; what cannot be written leaves nothing behind."""
    monkeypatch.setattr("cbatch.model.quantize._SHARD_BYTES", 2**16)
    folder, written = folder_of(tmp_path / "model", tiny_model()), tmp_path / "written"
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    assert run_command(["quantize", str(folder), "-o", str(written), "--device", "cpu", "-q"]) == 0
    assert len(list(written.glob("*.safetensors"))) > 1 and (written / "chat_template.jinja").is_file()
    assert model_in(written, None).formats == {INT4_ZEROS, INT8}
    assert run_command(["quantize", str(written), "-o", str(tmp_path / "again"), "--device", "cpu"]) == 2
    assert run_command(["quantize", str(folder), "-o", str(written), "--device", "cpu"]) == 2
    assert run_command(["quantize", str(tmp_path / "none"), "-o", str(tmp_path / "again")]) == 2
    assert run_command(["quantize", str(folder), "-o", "/proc/none/made", "--quantize", "int8"]) == 2
    told = capsys.readouterr().err
    assert f"There is no model folder {tmp_path / 'none'}." in told and "/proc/none/made cannot be written: No" in told
    transposed = folder_of(tmp_path / "gpt2", replace(saved_model("gpt2")))
    with pytest.raises(ConfigError, match="in a form that compressed-tensors does not have"):
        write_quantized(LoadPlan(str(transposed), quantize=INT4_WEIGHTS), tmp_path / "other")
    assert not list(tmp_path.glob("other*"))


def test_auto_takes_4_bits_only_if_they_are_near(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A choice that does not depend on what 4 bits lose would spoil a model, or waste half of the memory."""
    caplog.set_level("INFO", "cbatch")
    folder, auto = folder_of(tmp_path / "model", tiny_model()), Quantization("auto", "bf16")
    tensors = Tensors(folder)
    weights = calibrated(json.loads((folder / "config.json").read_text()), tensors, CPU, list(range(80)) * 8)
    assert weights is not None
    lost = weights.divergence()
    assert 0.001 < lost < 1
    monkeypatch.setattr(calibration, "run_through", lambda *_: torch.zeros(1, 80))
    weights.forget()
    assert weights.divergence() == float("inf"), "nothing went through the matrices"
    monkeypatch.undo()
    for bound, formats in ((lost * 4, {INT4_ZEROS, INT8}), (lost / 4, {INT8})):
        monkeypatch.setattr(calibration, "MOST_DIVERGENCE", bound)
        assert model_in(folder, auto).formats == formats
        write_quantized(LoadPlan(str(folder), quantize=auto), tmp_path / str(bound))
        assert model_in(tmp_path / str(bound), None).formats == formats
    assert "quantized to int8: int4 changes" in caplog.text
    assert model_in(tmp_path / "model", auto).formats == {INT8}
