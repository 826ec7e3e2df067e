"""Models with random damage, and what loading one costs: a sentence, little time and little memory, whatever is wrong.

Used by the tests of damaged files, and by `scripts/stress/damaged_models.py` for many of them.
"""

from __future__ import annotations

import shutil
import struct
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from gguf import GGMLQuantizationType

from cbatch.engine.base.errors import ModelError
from cbatch.engine.models.checkpoint import NoFastPath, load_fast_model
from cbatch.engine.models.formats.gguf import GgufModel
from tests.support.damaged_folders import Folder, damaged
from tests.support.gguf_files import byte_level_metadata, gguf_model, write_model
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
    whole_int8,
    write_folder,
)

MOST_SECONDS, MOST_BYTES = 1.0, 100 * 2**20
"""Of the processor's time, and of memory beyond what the process had before."""

_CPU = torch.device("cpu")

FOLDERS: dict[str, tuple[dict[str, Any], Encoder, str]] = {
    "awq": (awq_settings(32), awq(32), "qwen3"),
    "gptq": (gptq_settings(4, 32, desc_act=True), gptq(4, 32, act_order=True), "llama"),
    "w4a16": (compressed_settings(group_size=32, symmetric=False), compressed(4, 32, symmetric=False), "qwen3"),
    "w8a8": (compressed_settings("int-quantized", strategy="channel", num_bits=8), whole_int8(), "qwen2"),
    "fp8": (fp8_settings((32, 32)), fp8((32, 32)), "qwen3"),
    "mxfp4": ({"quant_method": "mxfp4"}, mxfp4, "gpt_oss"),
}

Files = dict[str, bytes]


class Outcome(NamedTuple):
    """What came of loading a model. sentence: why it was refused, None if it was not; bytes: at the peak"""

    sentence: str | None
    seconds: float
    bytes: int

    @property
    def violation(self) -> str | None:
        """What is wrong with it, if anything is."""
        if self.seconds >= MOST_SECONDS:
            return f"it took {self.seconds:.2f} s"
        if self.bytes >= MOST_BYTES:
            return f"it took {self.bytes / 2**20:.0f} MiB"
        if self.sentence is not None and ("\n" in self.sentence or len(self.sentence) >= 700):
            return f"it gave more than a sentence: {self.sentence}"
        return None


def outcome_of(load: Callable[[], object]) -> Outcome:
    """Loads a model on Linux. Raises what is neither a ModelError nor a NoFastPath, with which transformers gets it."""
    Path("/proc/self/clear_refs").write_text("5")  # forgets the peak
    before, start, sentence = _resident_bytes("VmRSS"), time.process_time(), None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            load()
    except (ModelError, NoFastPath) as error:
        sentence = str(error)
    seconds = time.process_time() - start
    return Outcome(sentence, seconds, max(0, _resident_bytes("VmHWM") - before))


def _resident_bytes(field: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field))


def load_gguf(path: Path) -> None:
    model = GgufModel([path])
    _ = model.tokenizer
    model.load(_CPU, "auto", quantize=None, activations="int8", weight_cache=None)


def load_folder(path: Path) -> None:
    load_fast_model(str(path), None, _CPU, "auto")


def write_gguf(path: Path) -> Path:
    """A model with a tokenizer."""
    metadata = byte_level_metadata()
    saved = gguf_model("llama", vocab_size=len(metadata["tokenizer.ggml.tokens"]))
    write_model(path, saved, GGMLQuantizationType.Q8_0, metadata)
    return path


def write_quantized_folder(name: str, path: Path) -> Path:
    """One of FOLDERS."""
    settings, encode, kind = FOLDERS[name]
    write_folder(path, tiny_model(kind, hidden_size=64, intermediate_size=64, head_dim=16), settings, encode)
    return path


def damaged_gguf_files(content: bytes, count: int, seed: int) -> Iterator[bytes]:
    """Copies with random bytes, numbers or lengths changed, mostly in the header, or with pieces cut out or doubled."""
    generator = np.random.default_rng(seed)
    stop = content.index(b"output_norm.weight") + 64
    values = (0, 1, 2**31, 2**32 - 1, 2**63, 2**64 - 1)
    for _ in range(count):
        data = bytearray(content)
        for _ in range(int(generator.integers(1, 4))):
            place = int(generator.integers(0, min(stop, len(data) - 8)))
            match int(generator.integers(0, 5)):
                case 0:
                    data[place] = int(generator.integers(0, 256))
                case 1:
                    struct.pack_into("<Q", data, place, values[int(generator.integers(0, len(values)))])
                case 2:
                    struct.pack_into("<I", data, place, int(generator.integers(0, 2**32)))
                case 3:
                    del data[place : place + int(generator.integers(1, 64))]
                case _:
                    data = data[: int(generator.integers(0, len(data)))] if generator.random() < 0.3 else data
                    data[place:place] = data[place : place + int(generator.integers(1, 64))]
            if len(data) < 32:
                break
        yield bytes(data)


def outcomes(kind: str, folder: Path, count: int, seed: int = 0) -> Iterator[tuple[int, Outcome]]:
    """Makes so many damaged models in a folder, one after the other, and loads each; with its number.

    kind: GGUF, or one of FOLDERS

    Raises AssertionError, with the number, for an error that is not a sentence.
    """
    for number, load in enumerate(_loads(kind, folder, count, seed)):
        try:
            yield number, outcome_of(load)
        except Exception as error:
            raise AssertionError(f"model {number} of {kind}, seed {seed}") from error


def _loads(kind: str, folder: Path, count: int, seed: int) -> Iterator[Callable[[], object]]:
    if kind == "GGUF":
        path = write_gguf(folder / "whole.gguf")
        load_gguf(path)  # may compile kernels
        for content in damaged_gguf_files(path.read_bytes(), count, seed):
            changed = folder / "damaged.gguf"
            changed.write_bytes(content)
            yield partial(load_gguf, changed)
            changed.unlink()
        return
    whole = write_quantized_folder(kind, folder / "whole")
    load_folder(whole)
    for files in damaged(Folder.read(whole), count, seed):
        changed = folder / "damaged"
        changed.mkdir()
        for name, content in files.items():
            (changed / name).write_bytes(content)
        yield partial(load_folder, changed)
        shutil.rmtree(changed)
