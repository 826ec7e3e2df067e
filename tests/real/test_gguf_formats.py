"""Every format that the package of llama.cpp can write, written from a real model and read again.

The metadata are those of llama.cpp's converter: of the file that was fetched, or of the converter itself.
"""

from __future__ import annotations

import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray

from scripts.real_model import CONVERTER, SMOLLM2
from tests.support.real_models import engine_of, need, perplexity

pytestmark = pytest.mark.real

NUM_TOKENS = 300

BOUNDS = {
    Kind.F32: 1.005, Kind.F16: 1.005, Kind.BF16: 1.01, Kind.Q8_0: 1.02, Kind.Q5_1: 1.25, Kind.Q5_0: 1.15,
    Kind.Q4_1: 1.15, Kind.Q4_0: 1.3, Kind.MXFP4: 4.0,
}  # fmt: skip
"""The most that the perplexity is, as a multiple of that of the fetched file, whose matrices are Q4_1 already.

The package rounds to the nearest, on another grid, and the embedding too: much is lost by writing.
"""

READING = 1.03
"""The most that it is as a multiple of that of the same file in float32: what is lost by reading."""

TERNARY = (Kind.TQ1_0, Kind.TQ2_0)
"""Two ways to write the same three values, which no model that was not trained for them survives."""

OUTTYPES = ("f32", "f16", "bf16", "q8_0")
"""Of the converter."""


def write(path: Path, kind: Kind) -> Path:
    """The fetched file of SmolLM2 with its matrices in another format; those of other sizes than its blocks in Q8_0."""
    reader = gguf.GGUFReader(need(SMOLLM2.gguf))
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    writer = gguf.GGUFWriter(str(path), fields.pop("general.architecture").contents())
    for name, field in fields.items():
        is_array = field.types[0] == gguf.GGUFValueType.ARRAY
        writer.add_key_value(name, field.contents(), field.types[0], field.types[-1] if is_array else None)
    for tensor in reader.tensors:
        numbers = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        writer.add_tensor(tensor.name, *packed(numbers, kind))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def packed(numbers: NDArray[np.float32], kind: Kind) -> tuple[NDArray[Any], None, Kind]:
    """The numbers as `GGUFWriter.add_tensor` takes them."""
    if numbers.ndim == 1:
        kind = Kind.F32
    elif numbers.shape[-1] % gguf.GGML_QUANT_SIZES[kind][0]:
        kind = Kind.Q8_0
    return gguf.quants.quantize(numbers, kind), None, kind


def measured(path: Path, **options: Any) -> float:
    with engine_of(path, **options) as engine:
        return perplexity(engine, NUM_TOKENS)


@cache
def fetched() -> float:
    return measured(SMOLLM2.gguf, dtype="float32")


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", BOUNDS, ids=lambda kind: kind.name)
def test_format(kind: Kind, tmp_path: Path) -> None:
    """Guards blocks of real numbers, some of which are very small, and their products."""
    path = write(tmp_path / "model.gguf", kind)
    found, exact = measured(path), measured(path, dtype="float32")
    assert 1 / READING < found / exact < READING
    assert 1 / READING < exact / fetched() < BOUNDS[kind]


@pytest.mark.exhaustive
def test_ternary_formats(tmp_path: Path) -> None:
    """Guards two formats that say the same: one is wrong if they differ."""
    found = [measured(write(tmp_path / f"{kind.name}.gguf", kind)) for kind in TERNARY]
    assert found[0] == pytest.approx(found[1], rel=1e-3)


def convert(folder: Path, path: Path, outtype: str) -> Path:
    """A file that llama.cpp's converter makes of a Hugging Face folder."""
    words = [sys.executable, str(need(CONVERTER)), str(need(folder)), "--outfile", str(path), "--outtype", outtype]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    return path


@pytest.mark.exhaustive
@pytest.mark.parametrize("outtype", OUTTYPES)
def test_converter(outtype: str, tmp_path: Path) -> None:
    """Guards what people hold: a file of the converter has the tokens, the text and the perplexity of the folder.

    It makes none of Gemma's folder, which lacks `tokenizer.model`; the file that was fetched is one of its own.
    """
    prompt = "What is the capital of France?"
    with engine_of(SMOLLM2.folder, dtype="float32") as engine:
        ids, expected = engine.encode(prompt), perplexity(engine, NUM_TOKENS)
        text = engine.generate(prompt, {"max_tokens": 12}).text
    with engine_of(convert(SMOLLM2.folder, tmp_path / "model.gguf", outtype)) as engine:
        assert engine.encode(prompt) == ids
        found = perplexity(engine, NUM_TOKENS)
        assert outtype != "f32" or engine.generate(prompt, {"max_tokens": 12}).text == text
    assert found == pytest.approx(expected, rel=0.02)
