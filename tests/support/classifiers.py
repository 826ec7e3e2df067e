"""Folders of tiny sequence classifiers, and what transformers makes of a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForSequenceClassification

from tests.support.embedders import save_network
from tests.support.model_folder import make_tokenizer


def save_classifier(folder: Path, name: str = "Qwen3", labels: Sequence[str] = ("RELEVANT",), **settings: Any) -> Path:
    """Writes a classifier. name: of its family, before ForSequenceClassification"""
    settings = {"id2label": dict(enumerate(labels))} | settings
    return save_network(folder, name, "ForSequenceClassification", make_tokenizer(), **settings)


@torch.no_grad()
def expected(folder: Path, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Logits of each prompt, one at a time."""
    network = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    return [network(torch.tensor([list(ids)])).logits[0].tolist() for ids in prompts]
