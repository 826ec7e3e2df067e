"""Folders of tiny sequence classifiers, and what transformers makes of a text."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForSequenceClassification

from tests.support.model_folder import make_tokenizer
from tests.support.tiny_models import COMMON, draw_weights


def save_classifier(folder: Path, name: str = "Qwen3", labels: Sequence[str] = ("RELEVANT",), **settings: Any) -> Path:
    """Writes a classifier. name: of its family, before ForSequenceClassification"""
    tokenizer = make_tokenizer()
    kind = "Gemma3Text" if name == "Gemma3" else name
    sizes = {"vocab_size": len(tokenizer), "head_dim": 16, "sliding_window": None, "eos_token_id": 2}
    sizes["id2label"] = dict(enumerate(labels))
    config = getattr(transformers, f"{kind}Config")(**COMMON | sizes | settings)
    network = getattr(transformers, f"{kind}ForSequenceClassification")(config).eval()
    draw_weights(network)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@torch.no_grad()
def expected(folder: Path, prompts: Sequence[Sequence[int]]) -> list[list[float]]:
    """Logits of each prompt, one at a time."""
    network = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    return [network(torch.tensor([list(ids)])).logits[0].tolist() for ids in prompts]
