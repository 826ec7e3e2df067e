"""Folders of tiny models that embed, and what transformers and plain arithmetic make of a text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from numpy.typing import NDArray
from safetensors.torch import save_file
from tokenizers import processors
from transformers import AutoModel, AutoTokenizer

from tests.support.model_folder import make_tokenizer
from tests.support.tiny_models import COMMON, draw_weights

GEMMA = {
    "use_bidirectional_attention": True, "tie_word_embeddings": True, "sliding_window": 12, "query_pre_attn_scalar": 16,
    "layer_types": ["sliding_attention", "full_attention"],
}  # fmt: skip
"""Settings of EmbeddingGemma, for `save_embedder`."""

TEXTS = ["hello world", "hello world, said the user", "é😀", "a", "The system helps the assistant. " * 3]


def save_embedder(folder: Path, name: str = "Qwen3", *, appends_end: bool = False, **settings: Any) -> Path:
    """Writes a model without an output head. name: of its class; appends_end: an end token comes after each text"""
    tokenizer = make_tokenizer()
    if appends_end:
        end = tokenizer.eos_token
        template = processors.TemplateProcessing(single=f"$A {end}", special_tokens=[(end, tokenizer.eos_token_id)])
        tokenizer.backend_tokenizer.post_processor = template
    return save_network(folder, name, "Model", tokenizer, **settings)


def save_network(folder: Path, name: str, task: str, tokenizer: Any, **settings: Any) -> Path:
    """Writes a model of a family, and a tokenizer. task: the end of its class's name"""
    kind = "Gemma3Text" if name == "Gemma3" else name
    sizes = {"vocab_size": len(tokenizer), "head_dim": 16, "sliding_window": None, "eos_token_id": 2}
    config = getattr(transformers, f"{kind}Config")(**COMMON | sizes | settings)
    network = getattr(transformers, kind + task)(config).eval()
    draw_weights(network)
    network.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def save_modules(
    folder: Path,
    pooling: dict[str, Any],
    *,
    dense: Sequence[torch.Tensor] = (),
    normalizes: bool = True,
    prompts: dict[str, str] | None = None,
) -> Path:
    """Writes the files of sentence-transformers beside a model. dense: matrices [columns, depth] without biases"""
    parts = ["Transformer", "Pooling", *["Dense"] * len(dense), *["Normalize"] * normalizes]
    paths = ["", *(f"{number}_{part}" for number, part in enumerate(parts) if number)]
    modules = [
        {"idx": number, "name": str(number), "path": path, "type": f"sentence_transformers.models.{part}"}
        for number, (part, path) in enumerate(zip(parts, paths, strict=True))
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    for path in paths[1:]:
        (folder / path).mkdir(exist_ok=True)
    (folder / paths[1] / "config.json").write_text(json.dumps(pooling))
    for path, matrix in zip(paths[2:], dense, strict=False):
        settings = {"bias": False, "activation_function": "torch.nn.modules.linear.Identity"}
        (folder / path / "config.json").write_text(json.dumps(settings))
        save_file({"linear.weight": matrix.contiguous()}, folder / path / "model.safetensors")
    (folder / "config_sentence_transformers.json").write_text(json.dumps({"prompts": prompts or {}}))
    return folder


@torch.no_grad()
def expected(
    folder: Path, texts: Sequence[str], mode: str = "mean", dense: Sequence[torch.Tensor] = ()
) -> NDArray[np.float32]:
    """Embeddings [N, D] of length 1, one text at a time. mode: as `Pooling.mode` names it"""
    network = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
    tokenizer, made = AutoTokenizer.from_pretrained(folder), list[torch.Tensor]()
    for text in texts:
        hidden = network(torch.tensor([tokenizer.encode(text)])).last_hidden_state[0]
        vector = {"mean": hidden.mean(0), "lasttoken": hidden[-1], "cls": hidden[0]}[mode]
        for matrix in dense:
            vector = matrix @ vector
        made.append(vector / vector.norm())
    return torch.stack(made).numpy()
