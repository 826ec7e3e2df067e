"""Loads the tokenizer of a model: into this process if it is known to work on any text, else into one of its own."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from cbatch.base.errors import CbatchError, ModelError, as_error
from cbatch.base.model_files import model_folder
from cbatch.base.units import format_bytes
from cbatch.text.backend.base import printable
from cbatch.text.backend.local import LocalBackend
from cbatch.text.backend.ordinary import is_ordinary, is_ordinary_file
from cbatch.text.backend.worker import WorkerBackend
from cbatch.text.fast_loader import TextTokenizer, TransformersTokenizer, from_folder

VOCABULARIES = ("tokenizer.json", "vocab*", "merges.txt", "*.model", "*.tiktoken")
SETTINGS = ("tokenizer_config.json", "special_tokens_map.json", "added_tokens.json")

MAX_VOCABULARY_BYTES, MAX_SETTINGS_BYTES = 64 << 20, 8 << 20
"""Of a file. The largest of known models have half as much."""


def load_tokenizer(source: str, revision: str | None) -> TextTokenizer | None:
    """The tokenizer of a folder or a hub id; None if a folder has none. Raises ModelError, with one sentence."""
    folder = Path(source)
    if folder.is_dir():
        if not any(any(folder.glob(pattern)) for pattern in ("tokenizer*", *VOCABULARIES)):
            return None
    else:
        try:
            folder = model_folder(source, revision, ("config.json", "tokenizer*", *VOCABULARIES, *SETTINGS))
        except OSError as error:
            raise ModelError(f"Cannot load the tokenizer of {source}: {printable(str(error))}.") from error
    _check_sizes(folder)
    if is_ordinary_file(folder / "tokenizer.json"):
        tokenizer = load_here(source, revision)
        if is_ordinary(_native(tokenizer)):
            return tokenizer
    return _load_elsewhere(source, revision)


def load_here(source: str, revision: str | None) -> TextTokenizer:
    """Loads a tokenizer into this process, whatever it is. Raises ModelError."""
    try:
        return from_folder(Path(source)) or _from_transformers(source, revision)
    except CbatchError:
        raise
    except BaseException as raised:  # a panic of the library, too
        reason = printable(str(as_error(raised))) or type(raised).__name__
        raise ModelError(f"Cannot load the tokenizer of {source}: {reason}.") from raised


def _load_elsewhere(source: str, revision: str | None) -> TextTokenizer:
    backend = WorkerBackend(source, revision)
    info = backend.info
    return TextTokenizer(backend, info["bos_id"], info["chat_template"], info["special_tokens"])


def _from_transformers(source: str, revision: str | None) -> TextTokenizer:
    from transformers import AutoTokenizer
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    original: Any = AutoTokenizer.from_pretrained(source, revision=revision, trust_remote_code=False)
    if not getattr(original, "is_fast", False):
        raise ModelError(f"The tokenizer of {source} has no tokenizer.json, which is needed for streaming text.")
    return TransformersTokenizer(original)


def _native(tokenizer: TextTokenizer) -> Tokenizer:
    assert isinstance(tokenizer.backend, LocalBackend)
    return tokenizer.backend.tokenizer


def _check_sizes(folder: Path) -> None:
    """Raises ModelError for files that are larger than any of a model."""
    limits = [(VOCABULARIES, MAX_VOCABULARY_BYTES), (SETTINGS, MAX_SETTINGS_BYTES)]
    for patterns, limit in limits:
        for path in (path for pattern in patterns for path in folder.glob(pattern)):
            if path.is_file() and (size := path.stat().st_size) > limit:
                raise ModelError(
                    f"{path} has {format_bytes(size)}, which is more than a tokenizer may have: {format_bytes(limit)}."
                )
