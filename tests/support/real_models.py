"""Real models in the cache of `scripts.real_model`, and a text that a person wrote."""

from __future__ import annotations

import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from cbatch.api import Engine
from scripts.real_model import COMMAND

PAGES = ("architecture", "chat", "cpu", "replicas")
"""Of the documentation, of which the prose is read."""


def need(path: Path) -> Path:
    """Skips the test unless the path is there."""
    if not path.exists():
        pytest.skip(f"{path} is missing; `{COMMAND}` fetches it")
    return path


def engine_of(path: Path, **options: Any) -> Engine:
    """An engine that writes no packed weights."""
    settings: dict[str, Any] = {"device": "cpu", "max_seqs": 4, "weight_cache": False, **options}
    return Engine(str(need(path)), **settings)


@cache
def prose() -> str:
    """Paragraphs of the documentation, without tables, code and links."""
    root = Path(__file__).parents[2] / "docs"
    text = "\n\n".join((root / f"{name}.md").read_text() for name in PAGES)
    text = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text)
    blocks = [" ".join(block.split()) for block in text.split("\n\n")]
    return "\n\n".join(block for block in blocks if len(block) > 80 and block[0] not in "|<#")


def perplexity(engine: Engine, num_tokens: int) -> float:
    """Of the first tokens of the prose."""
    score = engine.score(engine.encode(prose(), raw=True)[:num_tokens])
    assert score.error is None, score.error
    return score.perplexity
