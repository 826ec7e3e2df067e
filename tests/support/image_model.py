"""A tiny model that takes images: LLaVA with a language model of the Llama family, and 16 rows for each image."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from tests.support.tiny_models import draw_weights

_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}:{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for p in m.content %}{{ '<image>' if p.type == 'image' else p.text }}{% endfor %}{% endif %}</turn>\n"
    "{% endfor %}{% if add_generation_prompt %}Assistant:{% endif %}"
)


def save_image_model(folder: Path) -> Path:
    """Writes a model with random weights and its processor into a folder, which is returned."""
    import transformers
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers.models.clip import CLIPImageProcessorPil

    words = ["<pad>", "<s>", "</s>", "<image>", "</turn>", "<|im_start|>"]
    vocabulary = {word: number for number, word in enumerate([*words, *sorted(pre_tokenizers.ByteLevel.alphabet())])}
    inner = Tokenizer(models.BPE(vocabulary, []))
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer: Any = transformers.PreTrainedTokenizerFast(
        tokenizer_object=inner,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        additional_special_tokens=words[3:],
    )
    shape = {"num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.LlavaConfig(
        text_config={
            "model_type": "llama", "vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, **shape,
            "max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
        },
        vision_config={
            "model_type": "clip_vision_model", "hidden_size": 32, "intermediate_size": 48, **shape,
            "image_size": 32, "patch_size": 8, "projection_dim": 32,
        },
        image_token_id=3,
    )  # fmt: skip
    network = transformers.LlavaForConditionalGeneration(config)
    draw_weights(network, 1)
    network.generation_config.eos_token_id = 2
    network.save_pretrained(folder)
    transformers.LlavaProcessor(
        CLIPImageProcessorPil(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32}),
        tokenizer,
        patch_size=8,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=_TEMPLATE,
    ).save_pretrained(folder)
    return folder


def save_picture(path: Path, seed: int) -> None:
    """Writes a picture of its own."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (40, 50, 3), np.uint8)
    Image.fromarray(pixels).save(path)
