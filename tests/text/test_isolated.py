"""Tokenizers that break the library: a sentence at the start, or the error of one row."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer, normalizers

from cbatch.base import model_files
from cbatch.base.errors import ModelError, RequestError
from cbatch.model.load_plan import DEMO_MODEL
from cbatch.text import isolated
from cbatch.text.backend import TokenizerBackend
from cbatch.text.isolated import WorkerBackend, load_tokenizer
from cbatch.text.ordinary import is_known_pattern, is_ordinary, is_ordinary_file
from cbatch.text.patterns import QWEN2
from cbatch.text.tokenizer import ChatTokenizer
from tests.support.evil_tokenizers import GROWS, ORIGINAL, RARE, REFUSED, Change, split, write_folder

TEXTS = ["", "hello world", "日本語 é e\u0301 👩‍👩‍👧", "<|im_start|>x", " \n\n ", "\x00"]


@pytest.fixture(scope="module")
def worker() -> Iterator[WorkerBackend]:
    """The demo model's tokenizer in a process of its own."""
    yield WorkerBackend(str(DEMO_MODEL), None)


@pytest.fixture(scope="module")
def local() -> TokenizerBackend:
    return TokenizerBackend(Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json")))


@pytest.mark.parametrize("name", REFUSED)
def test_what_breaks_the_library_is_refused(name: str, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards the start of a run: one sentence, nothing of a panic, no control characters."""
    with pytest.raises(ModelError, match=r"^[^\n]*tokenizer of .*\.$") as caught:
        load_tokenizer(str(write_folder(tmp_path, REFUSED[name])), None)
    assert str(caught.value).isprintable() and capfd.readouterr().err == ""


def test_a_text_that_breaks_it_is_one_row(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Guards the other rows, and the run, against a process that aborts on one text."""
    found = load_tokenizer(str(write_folder(tmp_path, GROWS)), None)
    assert found is not None
    tokenizer = ChatTokenizer(found)
    before = tokenizer.encode("hello")
    with pytest.raises(RequestError, match="memory") as caught:
        tokenizer.encode(RARE)
    assert caught.value.code == "tokenizer_error"
    assert tokenizer.encode("hello") == before and capfd.readouterr().err == ""


@pytest.mark.parametrize("text", TEXTS)
def test_both_processes_give_the_same(text: str, worker: WorkerBackend, local: TokenizerBackend) -> None:
    """Guards what goes through the pipe: ids, offsets, text, and text as it comes."""
    for special in (True, False):
        theirs, ours = worker.encode(text, add_special_tokens=special), local.encode(text, add_special_tokens=special)
        assert theirs.ids == ours.ids and [tuple(pair) for pair in theirs.offsets] == ours.offsets
    ids = local.encode(text, add_special_tokens=False).ids
    assert worker.decode(ids, skip_special_tokens=False) == local.decode(ids, skip_special_tokens=False)
    streams = worker.stream(ids[:1]), local.stream(ids[:1])
    for token in ids[1:]:
        assert streams[0].push([token]) == streams[1].push([token])
    assert streams[0].flush() == streams[1].flush()
    assert [worker.id_to_token(one) for one in ids] == [local.id_to_token(one) for one in ids]
    assert str(local.decoder) == worker.decoder and worker.to_str() == local.to_str()


def test_a_text_goes_on_in_a_new_process(worker: WorkerBackend, local: TokenizerBackend) -> None:
    """Guards an answer whose row has nothing to do with the one that ended the process."""
    ids = local.encode("日本語 hello", add_special_tokens=False).ids
    stream, expected = worker.stream([]), local.stream([])
    text = stream.push(ids[:2])
    assert worker.sandbox.worker is not None
    worker.sandbox.worker.kill()
    assert text + stream.push(ids[2:]) + stream.flush() == expected.push(ids) + expected.flush()


@pytest.mark.parametrize("layout", [{}, {"indent": 2}, {"separators": (",", ":")}])
def test_ordinary_files_stay_here(layout: dict[str, Any], tmp_path: Path) -> None:
    """Guards the speed of ordinary tokenizers, whatever their file looks like; a part that is replaced is seen."""
    path = tmp_path / "tokenizer.json"
    path.write_text(json.dumps(ORIGINAL, **layout))
    tokenizer = Tokenizer.from_file(str(path))
    assert is_ordinary_file(path) and is_ordinary(tokenizer)
    tokenizer.normalizer = normalizers.Prepend("")
    assert not is_ordinary(tokenizer)


@pytest.mark.parametrize(
    "late", ['"continuing_subword_prefix": "##abcdefgh"', r'"\u0063ontinuing_subword_prefix": "##abcdefgh"']
)
def test_keys_behind_the_vocabulary_count(late: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a file whose beginning is harmless, and which says something else at its end."""
    monkeypatch.setattr("cbatch.text.ordinary.MAX_PARSED_BYTES", 20_000)
    path = tmp_path / "tokenizer.json"
    text = json.dumps(ORIGINAL)
    path.write_text(text)
    assert is_ordinary_file(path)
    path.write_text(text.removesuffix("}}") + f", {late}}}}}")
    assert not is_ordinary_file(path)


@pytest.mark.parametrize(
    ("pattern", "is_known"),
    [
        (QWEN2, True), (QWEN2.replace(r"\r", "\r"), True), (r"\p{N}{1,3}", True), ("[一-龥\u3040-ゟ]+", True), 
        (r"\d", True), ("", False), (QWEN2 + "|(a|a)*b", False),
        (r"(a+)+$", False), ("a*a*b", False), (r"\s+$", False), ("(?:x)*", False), (r"[[:alpha:]]+", False),
    ],
)  # fmt: skip
def test_known_patterns(pattern: str, is_known: bool) -> None:
    """Guards the run against patterns that take quadratic time or more, in the process that nothing bounds."""
    assert is_known_pattern(pattern) is is_known


@pytest.mark.parametrize(
    ("limit", "change", "sentence"),
    [
        (
            (isolated, "LIMITS", isolated.LIMITS._replace(cpu_seconds=0.2)),
            split(r"\s*\s*[^\s\S]"),
            "does not end within 0.2 s",
        ),
        ((model_files, "_LIMITS", {".json": 1000}), split("a"), "has more than 1000 bytes"),
    ],
    ids=["time", "size"],
)
def test_a_trial_has_bounds(
    limit: tuple[Any, str, Any], change: Change, sentence: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards the start against a tokenizer that takes for ever, and memory against a vocabulary of gigabytes."""
    monkeypatch.setattr(*limit)
    with pytest.raises(ModelError, match=sentence):
        load_tokenizer(str(write_folder(tmp_path, change)), None)
