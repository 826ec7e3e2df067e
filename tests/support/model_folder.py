"""A model folder on disk: a tiny random Llama with a byte-level tokenizer and a chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from tests.support.tiny_models import make_network

SPECIAL = ["<|bos|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for m in messages %}"
    "{% if m.role not in ['system', 'user', 'assistant'] %}{{ raise_exception('no such role') }}{% endif %}"
    "<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer() -> PreTrainedTokenizerFast:
    """Bytes, a few merges, and three special tokens; adds BOS to plain text."""
    backend = Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL],
        initial_alphabet=sorted(alphabet),
        show_progress=False,
    )
    backend.train_from_iterator(["user assistant system hello world"] * 3, trainer)
    backend.post_processor = processors.TemplateProcessing(single="<|bos|> $A", special_tokens=[("<|bos|>", 0)])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, bos_token="<|bos|>", eos_token="<|im_end|>")
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def save_model(
    folder: Path,
    *,
    kind: str = "llama",
    tokenizer: bool = True,
    generation: dict[str, Any] | None = None,
    context: int = 256,
) -> Path:
    """Writes config, weights, tokenizer and generation_config.json as a downloaded model would have them.

    kind: its `model_type`
    """
    made = make_tokenizer()
    sizes: dict[str, Any] = {"vocab_size": len(made), "max_position_embeddings": context, "eos_token_id": 2}
    if kind == "llama":
        network = make_network(kind, **sizes, head_dim=16)  # which the kernels support
    else:
        from tests.support.architectures import make_architecture  # which takes a while

        network = make_architecture(kind, **sizes)
    network.save_pretrained(folder)
    if tokenizer:
        made.save_pretrained(folder)
    settings = {"eos_token_id": 2} | (generation or {})
    (folder / "generation_config.json").write_text(json.dumps(settings))
    return folder
