"""GGUF files by the names that users give; damaged and hostile ones get one sentence each, quickly."""

from __future__ import annotations

import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest
from gguf import GGMLQuantizationType as Kind
from huggingface_hub.errors import EntryNotFoundError

from cbatch.base import hub
from cbatch.base.errors import ModelError, ModelNotFound
from cbatch.base.hub import gguf_paths, hub_file, is_gguf, split_names
from cbatch.cli.main import run_command
from cbatch.model.formats.gguf import GgufModel
from cbatch.model.formats.gguf_file import MAX_STRINGS, read_gguf
from tests.support.gguf_files import byte_level_metadata, gguf_model, write_model
from tests.support.model_fuzzer.kinds import WholeModels

pytestmark = pytest.mark.kernels

MOST_BYTES = 100 * 2**20


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """A file of a model with a tokenizer."""
    return WholeModels(tmp_path_factory.mktemp("whole")).content("gguf", "model.gguf")


def refusal(path: Path) -> str | None:
    """The sentence with which a file is refused, after a check of the memory that it took; None if it loads."""
    tracemalloc.start()
    try:
        _ = GgufModel([path]).tokenizer
        return None
    except ModelError as error:
        return str(error)
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MOST_BYTES


def put(form: str, place: int, *values: int) -> Callable[[bytes], bytes]:
    def change(content: bytes) -> bytes:
        data = bytearray(content)
        struct.pack_into("<" + form, data, place, *values)
        return bytes(data)

    return change


def after(text: bytes, form: str, *values: int, skip: int = 0) -> Callable[[bytes], bytes]:
    """Writes numbers behind the first place where a text stands in a header."""

    def change(content: bytes) -> bytes:
        return put(form, content.index(text) + len(text) + skip, *values)(content)

    return change


def entry(key: bytes, kind: int, value: bytes) -> Callable[[bytes], bytes]:
    """Adds an entry of metadata in front of all others, and one that keeps the tensors aligned."""

    def change(content: bytes) -> bytes:
        count = struct.unpack_from("<Q", content, 16)[0]
        added = struct.pack("<Q", len(key)) + key + struct.pack("<I", kind) + value
        filling = -(len(added) + 24) % 32
        added += struct.pack("<Q", 4) + b"fill" + struct.pack("<IQ", 8, filling) + b" " * filling
        return content[:16] + struct.pack("<Q", count + 2) + added + content[24:]

    return change


TENSOR = b"blk.0.attn_q.weight"
"""Behind its name: the number of dimensions, two sizes, the type and the offset."""

FAULTS: dict[str, tuple[Callable[[bytes], bytes], str]] = {
    "magic": (lambda content: b"GGML" + content[4:], "is not a GGUF file"),
    "empty": (lambda content: b"", "is not a GGUF file"),
    "short": (lambda content: content[:23], "is not a GGUF file"),
    "version 1": (put("I", 4, 1), "has version 1"),
    "big-endian": (put("I", 4, 3 << 24), "is big-endian"),
    "tensor count": (put("Q", 8, 2**63), "claims to have"),
    "entry count": (put("Q", 16, 2**40), "claims to have"),
    "more tensors than there are": (put("Q", 8, 60000), "is damaged"),
    "more entries than there are": (put("Q", 16, 60000), "is damaged"),
    "length of a key": (put("Q", 24, 2**62), "claims to have 4611686018427387904 bytes"),
    "text": (after(b"general.architecture", "Q", 2**50, skip=4), "claims to have"),
    "not UTF-8": (after(b"general.architecture", "B", 0xFF, skip=12), "is not UTF-8"),
    "unknown value type": (after(b"general.architecture", "I", 77), "unknown type 77"),
    "array count": (after(b"tokenizer.ggml.tokens", "Q", 2**60, skip=8), "claims to have"),
    "number array count": (after(b"tokenizer.ggml.token_type", "Q", 2**60, skip=8), "claims to have"),
    "array of unknown type": (after(b"tokenizer.ggml.token_type", "I", 99, skip=4), "unknown type 99"),
    "array of arrays": (after(b"tokenizer.ggml.tokens", "I", 9, skip=4), "holds arrays"),
    "key twice": (entry(b"llama.block_count", 4, struct.pack("<I", 2)), "twice"),
    "alignment 0": (entry(b"general.alignment", 4, struct.pack("<I", 0)), "alignment"),
    "alignment 48": (entry(b"general.alignment", 4, struct.pack("<I", 48)), "alignment"),
    "alignment as text": (entry(b"general.alignment", 8, struct.pack("<Q", 2) + b"32"), "alignment"),
    "split count as text": (entry(b"split.count", 8, struct.pack("<Q", 1) + b"1"), "parts must keep their names"),
    "one part of three": (entry(b"split.count", 2, struct.pack("<H", 3)), "is not part 1 of 1"),
    "parts lack tensors": (entry(b"split.tensors.count", 5, struct.pack("<i", 999)), "should hold 999"),
    "no dimensions": (after(TENSOR, "I", 0), "has 0 dimensions"),
    "many dimensions": (after(TENSOR, "I", 2**31), "dimensions"),
    "a huge dimension": (after(TENSOR, "Q", 2**63, skip=4), "is damaged"),
    "dimensions that overflow": (after(TENSOR, "QQ", 2**32, 2**32, skip=4), "not within the file"),
    "dimension 0": (after(TENSOR, "Q", 0, skip=12), "has the shape"),
    "rows that end in a block": (after(TENSOR, "Q", 65, skip=4), "has the shape"),
    "unknown tensor type": (after(TENSOR, "I", 5000, skip=20), "format 5000, which is not read"),
    "old tensor type": (after(TENSOR, "I", 9, skip=20), "format 9, which is not read"),
    "offset past the end": (after(TENSOR, "Q", 2**40, skip=24), "not within the file"),
    "offset that wraps around": (after(TENSOR, "Q", 2**64 - 32, skip=24), "not within the file"),
    "offset without alignment": (after(TENSOR, "Q", 33, skip=24), "not within the file"),
    "overlapping tensors": (after(TENSOR, "Q", 0, skip=24), "overlap"),
    "cut off in the tensors": (lambda content: content[:-64], "not within the file"),
    "cut off in the header": (lambda content: content[:2000], "is damaged"),
    "tensor twice": (lambda content: content.replace(b"blk.1.attn_q.weight", TENSOR), "twice"),
    "architecture": (lambda content: content.replace(b"\0llama", b"\0lamma", 1), "lamma"),
    "a layer too many": (after(b"llama.block_count", "I", 3, skip=4), "3 layers"),
    "absurdly many layers": (after(b"llama.block_count", "I", 2**31, skip=4), "block_count"),
    "absurdly many heads": (after(b"llama.attention.head_count", "I", 2**30, skip=4), "one of its sizes is"),
    "no heads": (after(b"llama.attention.head_count", "I", 0, skip=4), "heads"),
    "KV heads": (after(b"llama.attention.head_count_kv", "I", 3, skip=4), "heads"),
    "no KV heads": (after(b"llama.attention.head_count_kv", "I", 0, skip=4), "heads"),
    "absurd head": (after(b"llama.attention.key_length", "I", 2**30, skip=4), "one of its sizes is"),
    "absurd rotation": (after(b"llama.rope.dimension_count", "I", 2**30, skip=4), "rotate"),
    "base is NaN": (after(b"llama.rope.freq_base", "I", 0x7FC00000, skip=4), "rope.freq_base"),
    "base is 0": (after(b"llama.rope.freq_base", "I", 0, skip=4), "rope.freq_base"),
    "width": (after(b"llama.embedding_length", "I", 2**30, skip=4), "another width"),
    "number as text": (lambda content: entry(b"llama.vision", 4, b"\0" * 4)(content).replace(
        b"llama.context_length", b"llama.context_lengtx"), "context_length"),
    "missing tensor": (lambda content: content.replace(b"blk.1.ffn_up.weight", b"blk.1.ffn_uq.weight"), "ffn_uq"),
    "embedding": (after(b"token_embd.weight", "Q", 100, skip=12), "shape of lm_head.weight"),
    "tokens beyond the embedding": (
        lambda content: after(b"token_embd.weight", "Q", 100, skip=12)(
            after(b"output.weight", "Q", 100, skip=12)(content)
        ),
        "tokens for an embedding",
    ),
    "a merge that is none": (lambda content: content.replace("Ġ h".encode(), "Ġ_h".encode(), 1), "merges"),
    "unknown split": (lambda content: content.replace(b"gpt-2", b"gpt-9", 1), "gpt-9"),
    "template is a number": (lambda content: entry(b"tokenizer.chat_template", 4, b"\0" * 4)(
        content.replace(b"tokenizer.chat_template", b"tokenizer.chat_templatx")), "chat template"),
}  # fmt: skip


@pytest.mark.parametrize("name", FAULTS)
def test_a_damaged_file_gets_one_sentence(name: str, whole: bytes, tmp_path: Path) -> None:
    """Guards every length, count, place and type that a file claims."""
    change, expected = FAULTS[name]
    path = tmp_path / "damaged.gguf"
    path.write_bytes(change(whole))
    found = refusal(path)
    assert found is not None and expected in found
    assert found.count(". ") == 0 and found.endswith(".") and len(found) < 400 + len(str(path)), found


def test_many_texts_are_refused_before_they_are_read(whole: bytes, tmp_path: Path) -> None:
    """Guards time and memory: an array with room for millions of texts in the file is refused for its count alone."""
    count = MAX_STRINGS + 1
    path = tmp_path / "many.gguf"
    path.write_bytes(entry(b"many", 9, struct.pack("<IQ", 8, count) + bytes(8 * count))(whole))
    found = refusal(path)
    assert found is not None and f"claims to have {count} texts" in found


def test_what_is_no_file(tmp_path: Path) -> None:
    """Guards against waiting for a pipe, and against folders and missing parts."""
    os.mkfifo(tmp_path / "pipe.gguf")
    with pytest.raises(ModelError, match="There is no file"):
        gguf_paths(str(tmp_path / "pipe.gguf"), None)
    with pytest.raises(ModelError, match="is not a GGUF file"):
        read_gguf([tmp_path / "pipe.gguf"])
    (tmp_path / "a-00001-of-00003.gguf").touch()
    with pytest.raises(ModelError, match="a-00002-of-00003"):
        gguf_paths(str(tmp_path / "a-00001-of-00003.gguf"), None)
    with pytest.raises(ModelError, match="part 4 of 3"):
        split_names("a-00004-of-00003.gguf")
    assert split_names("x/b-00002-of-00002.gguf") == ["x/b-00001-of-00002.gguf", "x/b-00002-of-00002.gguf"]


def test_names_of_files_on_the_hub(tmp_path: Path) -> None:
    """Guards `ID:FILE.gguf` against names of files here, and of models that are none."""
    assert hub_file("me/model-GGUF:sub/model-Q4_K_M.gguf") == ("me/model-GGUF", "sub/model-Q4_K_M.gguf")
    for name in ("./me/model:x.gguf", "/a/b:x.gguf", "model.gguf", "me/model:x.safetensors", "me:x.gguf"):
        assert hub_file(name) is None
    assert is_gguf("a.GGUF") and not is_gguf("a.gguf.txt") and not is_gguf(str(tmp_path))


def test_info_says_formats_and_bits(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Guards `cbatch info -m model.gguf`, and the sentence and exit code for a damaged file."""
    path, metadata = tmp_path / "model.gguf", byte_level_metadata()
    write_model(path, gguf_model("llama", vocab_size=len(metadata["tokenizer.ggml.tokens"])), Kind.Q8_0, metadata)
    assert run_command(["info", "-m", str(path), "--device", "cpu"]) == 0
    shown = capsys.readouterr().out
    assert "GGUF with 8.59 bits a weight (tensors: 16 Q8_0, 5 F32)" in shown and "model.gguf (llama)" in shown
    path.write_bytes(path.read_bytes()[:-64])
    assert run_command(["info", "-m", str(path), "--device", "cpu"]) == 2
    said = capsys.readouterr().err.splitlines()
    assert len(said) == 1 and "is damaged: the tensor" in said[0] and "is not within the file" in said[0]


def test_all_parts_are_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards split models on the hub, a revision, and a file that is not there."""
    asked = []

    def download(repository: str, name: str, *, revision: str | None) -> str:
        asked.append((repository, name, revision))
        if "none" in name:
            raise EntryNotFoundError("404")
        return str(tmp_path / name)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: [])
    found = gguf_paths("me/m-GGUF:q8/m-00002-of-00002.gguf", "main")
    assert found == [tmp_path / f"q8/m-0000{number}-of-00002.gguf" for number in (1, 2)]
    assert asked == [("me/m-GGUF", f"q8/m-0000{number}-of-00002.gguf", "main") for number in (1, 2)]
    with pytest.raises(ModelNotFound, match=r"me/m-GGUF has no file none\.gguf"):
        gguf_paths("me/m-GGUF:none.gguf", None)


def test_the_tower_is_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards images of models on the hub: with a model comes its tower, which lies above its folder, before it."""
    listed = ["mmproj-BF16.gguf", "mmproj-F16.gguf", "q8/m.gguf", "q8/other.gguf", "q4/mmproj-F16.gguf"]
    asked = []

    def download(repository: str, name: str, *, revision: str | None) -> str:
        asked.append(name)
        (path := tmp_path / name).parent.mkdir(exist_ok=True)
        path.touch()
        return str(path)

    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    monkeypatch.setattr(huggingface_hub.HfApi, "list_repo_files", lambda *_, **__: listed)
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    assert gguf_paths("me/m:q8/m.gguf", None) == [tmp_path / "q8/m.gguf"] and asked == ["mmproj-F16.gguf", "q8/m.gguf"]
    assert hub.mmproj_paths("me/m:q8/m.gguf", tmp_path / "q8/m.gguf") == [tmp_path / "mmproj-F16.gguf"]
    assert hub.mmproj_paths(str(tmp_path / "q8/m.gguf"), tmp_path / "q8/m.gguf") == []
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: str(tmp_path))
    gguf_paths("me/m:q8/m.gguf", None)
    assert asked[2:] == ["q8/m.gguf"]


def test_files_of_the_hub_are_looked_for_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the time until a wrong name is told, and files in the cache, which need no network."""
    asked = []
    monkeypatch.setattr(huggingface_hub.constants, "is_offline_mode", lambda: False)
    monkeypatch.setattr(hub, "_ask_hub", lambda repository, *_, **__: asked.append(repository))
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: None)
    hub.check_hub_model("me/m-GGUF:m.gguf", None)
    assert asked == ["me/m-GGUF"]
    monkeypatch.setattr(huggingface_hub, "try_to_load_from_cache", lambda *_, **__: str(tmp_path))
    hub.check_hub_model("me/m-GGUF:m.gguf", None)
    hub.check_hub_model(str(tmp_path / "m.gguf"), None)
    hub.check_hub_model("m.gguf", None)
    assert asked == ["me/m-GGUF"] and hub.is_gguf("me/m-GGUF:m.gguf")
