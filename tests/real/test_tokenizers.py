"""Published tokenizers: as transformers reads them, and as GGUF files have them."""

from __future__ import annotations

import pytest
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from cbatch.text.gguf_tokenizer import tokenizer_of
from cbatch.text.loading import load_here
from scripts.real_model import TOKENIZERS, tokenizer_folder
from tests.support.gguf_files import tokenizer_metadata
from tests.support.real_models import need
from tests.support.samples import sampled
from tests.text.test_gguf_tokenizer import HARD, TEXTS, tokens_of

pytestmark = pytest.mark.real

SPLITS = {
    "deepseek_v3": "deepseek-v3",
    "gptoss": "gpt-4o",
    "llama3": "llama-bpe",
    "llama3_1": "llama-bpe",
    "qwen3": "qwen2",
}
"""Llama.cpp's names for how byte-level ones split text. The others have scores, which only their GGUF files hold."""


@pytest.mark.parametrize("name", sampled(list(TOKENIZERS), 2, keep=["llama2"]))
def test_tokens_are_those_of_transformers(name: str) -> None:
    """Guards published tokenizers: their tokens, the token that a text begins with, and the text of tokens."""
    folder = need(tokenizer_folder(name))
    ours, theirs = load_here(str(folder), None), AutoTokenizer.from_pretrained(folder)
    for text in [*TEXTS, *HARD]:
        ids = theirs(text).input_ids
        assert ours.backend.encode(text).ids == ids, text
        assert ours.backend.decode(ids) == theirs.decode(ids, skip_special_tokens=True), text


@pytest.mark.parametrize("name", sampled(list(SPLITS), 2, keep=["deepseek_v3"]))
def test_gguf_files_of_published_tokenizers(name: str) -> None:
    """Guards what the names of ways to split text stand for, on vocabularies and merges that people use."""
    backend = Tokenizer.from_file(str(need(tokenizer_folder(name)) / "tokenizer.json"))
    tokens = tokens_of(backend)
    found = tokenizer_of(tokenizer_metadata(backend, tokens, SPLITS[name]), len(tokens))
    assert found is not None
    for text in [*TEXTS, *HARD]:
        ids = backend.encode(text, add_special_tokens=False).ids
        assert found.backend.encode(text, add_special_tokens=False).ids == ids, text
