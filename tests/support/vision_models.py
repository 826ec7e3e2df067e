"""Tiny random models that take images, with their processors, in folders as they are published."""

from __future__ import annotations

from base64 import b64decode, b64encode
from collections.abc import Callable, Sequence
from importlib import import_module
from io import BytesIO
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import transformers
from PIL import Image
from PIL.ImageSequence import Iterator as iter_frames
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from cbatch.model.hf.vision import load_processor, processor_class
from tests.support.tiny_models import draw_weights
from tests.support.wrappers import WRONGLY_SAVED

TEXT = {
    "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False, "max_position_embeddings": 2048,
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
WINDOW = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
TOWER = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 2}
PATCHES = {"patch_size": 8, "spatial_merge_size": 2, "temporal_patch_size": 2}
PINPOINTS = [[32, 64], [64, 32], [64, 64]]
SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8}
CLIP = {**SIGLIP, "model_type": "clip_vision_model", "projection_dim": 32}
AREA = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
TILES = [f"{row}_col_{column}" for row in range(1, 5) for column in range(1, 5)]
"""Numbers of tiles in names of special tokens."""
NAMES = {
    "glm_ocr": "Glm46VProcessor", "glmga": "Glm46VProcessor", "qwen2_5_omni_thinker": "Qwen2_5OmniProcessor",
    "qwen3_omni_moe_thinker": "Qwen3OmniMoeProcessor",
}  # fmt: skip
"""Of processors whose type has none of its own in transformers."""
TEMPLATE = (
    "{% for message in messages %}{{ message.role }}:{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content %}{% if part.type == 'image' %}IMAGE{% elif part.type == 'video' %}VIDEO"
    "{% else %}{{ part.text }}{% endif %}{% endfor %}{% endif %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)


class _Parts(NamedTuple):
    config: Any
    processor: Any


def _tokenizer(*specials: str, are_last: bool = False, **named: str) -> Any:
    """A tokenizer of bytes that lets texts begin with BOS.

    named:    special tokens that its processor finds by these names
    are_last: whether these and the others come behind the bytes
    """
    kinds = [[*specials, *named.values()], sorted(pre_tokenizers.ByteLevel.alphabet())]
    names = ["<pad>", "<s>", "</s>", *chain.from_iterable(reversed(kinds) if are_last else kinds)]
    tokenizer = Tokenizer(models.BPE({name: number for number, name in enumerate(dict.fromkeys(names))}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    tokenizer.add_special_tokens([*specials, *named.values()])
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, bos_token="<s>", eos_token="</s>", pad_token="<pad>", extra_special_tokens=named
    )


def _text(kind: str, tokenizer: Any, **own: Any) -> dict[str, Any]:
    return {"model_type": kind, "vocab_size": len(tokenizer), **TEXT, **own}


def _images(module: str, name: str, **settings: Any) -> Any:
    """An image processor that needs no torchvision."""
    found = import_module(f"transformers.models.{module}.image_processing_pil_{module}")
    return getattr(found, f"{name}ImageProcessorPil")(**settings)


def _size(height: int, width: int) -> dict[str, int]:
    return {"height": height, "width": width}


def _made(
    kind: str, config: Any, images: Any, tokenizer: Any, image: str, video: str = "<video>", **settings: Any
) -> _Parts:
    """image, video: what the chat template writes for one"""
    template = ("{{ bos_token }}" if kind == "internvl" else "") + TEMPLATE.replace("IMAGE", image).replace(
        "VIDEO", video
    )
    made = processor_class(kind, NAMES.get(kind, ""))(
        image_processor=images, tokenizer=tokenizer, chat_template=template, **settings
    )
    return _Parts(config, made)


def _idefics3(kind: str = "idefics3", name: str = "Idefics3") -> _Parts:
    tokenizer = _tokenizer(
        "<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>", *(f"<row_{one}>" for one in TILES)
    )
    config = getattr(transformers, f"{name}Config")(
        text_config=_text("llama", tokenizer), vision_config={**TOWER, "image_size": 32, "patch_size": 8},
        scale_factor=2, image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    images = _images(kind, name, size={"longest_edge": 64}, max_image_size={"longest_edge": 32})
    videos = {"video_processor": VIDEOS["smolvlm"]()} if kind == "smolvlm" else {}
    return _made(kind, config, images, tokenizer, "<image>", image_seq_len=4, **videos)


def _llava(kind: str = "llava", name: str = "Llava", **settings: Any) -> _Parts:
    tokenizer = _tokenizer("<image>", "<video>")
    ids = tokenizer.convert_tokens_to_ids
    settings |= {"video_token_id": ids("<video>")} if "video" in kind else {}
    config = getattr(transformers, f"{name}Config")(
        text_config=_text("llama", tokenizer), image_token_id=ids("<image>"), vision_config=CLIP, **settings
    )
    crop = {"size": {"shortest_edge": 32}, "crop_size": _size(32, 32)}
    if kind == "video_llava":
        images = transformers.VideoLlavaImageProcessor(**crop)
    elif "image_grid_pinpoints" in settings:
        images = _images("llava_next", "LlavaNext", image_grid_pinpoints=PINPOINTS, **crop)
    else:
        images = _images("clip", "CLIP", **crop)
    given = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return _made(kind, config, images, tokenizer, "<image>", **given)


def _llava_next(kind: str = "llava_next", name: str = "LlavaNext") -> _Parts:
    return _llava(kind, name, image_grid_pinpoints=PINPOINTS)


def _vipllava() -> _Parts:
    return _llava("vipllava", "VipLlava", vision_feature_layers=[-2, -1])


def _mistral3(
    kind: str = "mistral3", name: str = "Mistral3", text_kind: str = "mistral", text: dict[str, Any] | None = None
) -> _Parts:
    tokenizer = _tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]")
    config = getattr(transformers, f"{name}Config")(
        text_config=_text(text_kind, tokenizer) | (text or {"sliding_window": None}), spatial_merge_size=2,
        vision_config={**TOWER, "model_type": "pixtral", "head_dim": 16, "image_size": 64, "patch_size": 8},
        image_token_id=tokenizer.convert_tokens_to_ids("[IMG]"),
    )  # fmt: skip
    images = _images("pixtral", "Pixtral", size={"longest_edge": 64}, patch_size=_size(8, 8))
    return _made(kind, config, images, tokenizer, "[IMG]", patch_size=8, spatial_merge_size=2)


def _lighton_ocr() -> _Parts:
    tokenizer = _tokenizer(image_token="[IMG]", image_break_token="[IMG_BREAK]", image_end_token="[IMG_END]")
    config = transformers.LightOnOcrConfig(
        text_config=_text("qwen3", tokenizer), spatial_merge_size=2,
        vision_config={**TOWER, "model_type": "pixtral", "head_dim": 16, "image_size": 64, "patch_size": 8},
        image_token_id=tokenizer.convert_tokens_to_ids("[IMG]"),
    )  # fmt: skip
    images = _images("pixtral", "Pixtral", size={"longest_edge": 64}, patch_size=_size(16, 16))
    return _made("lighton_ocr", config, images, tokenizer, "[IMG]", patch_size=8, spatial_merge_size=2)


def _internvl() -> _Parts:
    tokenizer = _tokenizer(
        start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>", video_token="<video>"
    )
    config = transformers.InternVLConfig(
        text_config=_text("qwen2", tokenizer), vision_config={**TOWER, "image_size": [32, 32], "patch_size": [8, 8]},
        image_token_id=tokenizer.convert_tokens_to_ids("<IMG_CONTEXT>"), downsample_ratio=0.5, image_seq_length=4,
    )  # fmt: skip
    images = _images("got_ocr2", "GotOcr2", size=_size(32, 32), crop_to_patches=True, max_patches=4)
    return _made("internvl", config, images, tokenizer, "<IMG_CONTEXT>", image_seq_length=4)


def _aya_vision() -> _Parts:
    tokenizer = _tokenizer(
        "<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "<|IMG_PATCH|>", "<|IMG_LINE_BREAK|>", "TILE_GLOBAL",
        *(f"TILE_{number}" for number in range(1, 5)), "TILE",
    )  # fmt: skip
    config = transformers.AyaVisionConfig(
        text_config=_text("cohere2", tokenizer, **WINDOW), downsample_factor=2,
        vision_config={**TOWER, "model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8},
        image_token_id=tokenizer.convert_tokens_to_ids("<|IMG_PATCH|>"), adapter_layer_norm_eps=1e-6,
    )  # fmt: skip
    images = _images("got_ocr2", "GotOcr2", size=_size(32, 32), crop_to_patches=True, max_patches=4)
    given = {"patch_size": 8, "img_size": 32, "downsample_factor": 2}
    return _made("aya_vision", config, images, tokenizer, "<image>", **given)


def _lfm2_vl() -> _Parts:
    tokenizer = _tokenizer(
        *(f"<|img_row_{one}|>" for one in TILES), image_token="<image>", image_start_token="<|image_start|>",
        image_end_token="<|image_end|>", image_thumbnail="<|img_thumbnail|>",
    )  # fmt: skip
    layers = ["conv", *["full_attention"] * 4]
    config = transformers.Lfm2VlConfig(
        text_config=_text("lfm2", tokenizer, layer_types=layers, num_hidden_layers=5), projector_hidden_size=48,
        vision_config={**TOWER, "model_type": "siglip2_vision_model", "patch_size": 8, "num_patches": 64},
        image_token_id=tokenizer.image_token_id, downsample_factor=2, tie_word_embeddings=False,
    )  # fmt: skip
    images = transformers.Lfm2VlImageProcessor(
        tile_size=32, min_image_tokens=4, max_image_tokens=8, max_num_patches=64, encoder_patch_size=8, max_tiles=4
    )
    return _made("lfm2_vl", config, images, tokenizer, "<image>")


def _cohere2_vision() -> _Parts:
    tokenizer = _tokenizer(
        boi_token="<|START_OF_IMG|>", eoi_token="<|END_OF_IMG|>", image_token="<|IMG_PATCH|>",
        img_line_break_token="<|IMG_LINE_BREAK|>",
    )  # fmt: skip
    config = transformers.Cohere2VisionConfig(
        text_config=_text("cohere2", tokenizer, **WINDOW), downsample_factor=2,
        vision_config={**TOWER, "model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8},
        image_token_id=tokenizer.image_token_id, alignment_intermediate_size=64,
    )  # fmt: skip
    # The processor takes the square of `patch_size` for the number of tokens of a tile.
    images = transformers.Cohere2VisionImageProcessor(size=_size(32, 32), patch_size=2, max_patches=4)
    return _made("cohere2_vision", config, images, tokenizer, "<|IMG_PATCH|>")


def _got_ocr2() -> _Parts:
    tokenizer = _tokenizer("<imgpad>", "<img>", "</img>")
    tower = {"hidden_size": 32, "output_channels": 16, "num_hidden_layers": 2, "num_attention_heads": 2}
    config = transformers.GotOcr2Config(
        text_config=_text("qwen2", tokenizer), image_token_id=tokenizer.convert_tokens_to_ids("<imgpad>"),
        vision_config={**tower, "image_size": 512, "patch_size": 8, "mlp_dim": 48, "window_size": 8,
                       "global_attn_indexes": []},
    )  # fmt: skip
    images = _images("got_ocr2", "GotOcr2", size=_size(512, 512))  # its processor always takes 256 tokens
    return _made("got_ocr2", config, images, tokenizer, "<img><imgpad></img>")


QWEN_TOWER = {"hidden_size": 32, "out_hidden_size": 64, "depth": 2, "num_heads": 2, "intermediate_size": 48, **PATCHES}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}


def _grid(
    kind: str, name: str, tower: dict[str, Any], rope: dict[str, Any] | None, text_kind: str = "",
    images: tuple[str, str] = ("qwen2_vl", "Qwen2VL"), **text: Any,
) -> _Parts:  # fmt: skip
    """A model whose images are grids of patches, and whose positions mostly have three axes (M-RoPE).

    tower:     settings of its vision tower
    rope:      of the rotary embedding; None: as its type has it
    text_kind: type of its language model, if that is not called after it
    images:    module and name of its image processor
    """
    begin, end, image, video = "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"
    around = ["<|begin_of_video|>", "<|end_of_video|>"] if kind.startswith("glm") else []
    tokenizer = _tokenizer(begin, end, *around, image_token=image, video_token=video)
    ids = tokenizer.convert_tokens_to_ids
    marks = {f"{one}_{side}_token_id": ids(token) for one in ("vision", "image", "video")
             for side, token in (("start", begin), ("end", end))}  # fmt: skip
    config = getattr(transformers, f"{name}Config")(
        text_config=_text(text_kind or f"{kind}_text", tokenizer, **({} if rope is None else _rope(rope)), **text),
        vision_config=tower,
        image_token_id=ids(image), video_token_id=ids(video), **marks,
    )  # fmt: skip
    frames = 1 if images[0] == "paddleocr_vl" else 2
    size = AREA
    if images[0].startswith("glm"):
        size = {edge: frames * count for edge, count in size.items()}
    made = _images(*images, patch_size=8, merge_size=2, temporal_patch_size=frames, size=size)
    return _made(kind, config, made, tokenizer, f"{begin}{image}{end}", video.join(around or [begin, end]))


def _rope(settings: dict[str, Any]) -> dict[str, Any]:
    """Settings of a rotary embedding, with a base for which each of its frequencies matters to a short text."""
    return {"rope_parameters": {"rope_type": "default", "rope_theta": 30.0, **settings}}


def _qwen2_vl() -> _Parts:
    tower = {"embed_dim": 32, "hidden_size": 64, "depth": 2, "num_heads": 2, "mlp_ratio": 2, **PATCHES}
    return _grid("qwen2_vl", "Qwen2VL", tower, {"mrope_section": [2, 3, 3]})


def _qwen2_5_vl() -> _Parts:
    tower = {**QWEN_TOWER, "window_size": 32, "fullatt_block_indexes": [1]}
    return _grid("qwen2_5_vl", "Qwen2_5_VL", tower, {"mrope_section": [2, 3, 3]})


def _qwen3_vl(kind: str = "qwen3_vl", name: str = "Qwen3VL", **text: Any) -> _Parts:
    tower = {**QWEN_TOWER, "depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]}
    return _grid(kind, name, tower, {"mrope_section": [4, 2, 2], "mrope_interleaved": True}, **text)


def _qwen3_5(kind: str = "qwen3_5", name: str = "Qwen3_5", **text: Any) -> _Parts:
    linear = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2}
    linear |= {"linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"]}
    rope = {"mrope_section": [2, 1, 1], "mrope_interleaved": True, "partial_rotary_factor": 0.5}
    return _grid(kind, name, {**QWEN_TOWER, "num_position_embeddings": 64}, rope, **linear, **text)


def _glm4v(kind: str = "glm4v", name: str = "Glm4v", text_kind: str = "", **text: Any) -> _Parts:
    rope = {"mrope_section": [1, 1, 2], "partial_rotary_factor": 0.5}
    images = (kind, name) if kind in ("glm46v", "glmga") else ("glm4v", "Glm4v")
    return _grid(kind, name, {**QWEN_TOWER, "image_size": 64}, rope, text_kind, images, **text)


def _glm4v_moe() -> _Parts:
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
    return _glm4v("glm4v_moe", "Glm4vMoe", **experts)


def _glm_ocr() -> _Parts:
    tower = {**QWEN_TOWER, "image_size": 64}
    return _grid("glm_ocr", "GlmOcr", tower, {"mrope_section": [2, 3, 3]}, images=("glm46v", "Glm46V"))


def _paddleocr_vl() -> _Parts:
    tower = {**TOWER, "image_size": 64, "patch_size": 8, "spatial_merge_size": 2}
    images = ("paddleocr_vl", "PaddleOCRVL")
    return _grid("paddleocr_vl", "PaddleOCRVL", tower, {"mrope_section": [2, 3, 3]}, images=images)


def _exaone4_5() -> _Parts:
    tower = {**QWEN_TOWER, "window_size": 32, "fullatt_block_indexes": [1], "num_key_value_heads": 1}
    return _grid("exaone4_5", "Exaone4_5_", tower, {}, "exaone4", **WINDOW)


def _kimi_k25() -> _Parts:
    tokenizer = _tokenizer("<|media_begin|>", image_token="<|media_pad|>", video_token="<|video|>")
    latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16}
    experts = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1,
               "topk_group": 1, "first_k_dense_replace": 1}  # fmt: skip
    text = {**_text("deepseek_v3", tokenizer, **latent, **experts), "num_key_value_heads": 4, "head_dim": 8}
    config = transformers.Kimi_K25Config(
        text_config=text, image_token_id=tokenizer.image_token_id, video_token_id=tokenizer.video_token_id,
        vision_config={**TOWER, "patch_size": 8, "pos_emb_height": 8, "pos_emb_width": 8}, projection_hidden_size=32,
        tie_word_embeddings=False,
    )  # fmt: skip
    images = transformers.Kimi_K25ImageProcessor(patch_size=8, max_patches=64)
    return _made("kimi_k25", config, images, tokenizer, "<|media_begin|><|media_pad|>", "<|video|>")


def _llava_onevision() -> _Parts:
    tokenizer = _tokenizer("<image>", "<video>")
    ids = tokenizer.convert_tokens_to_ids
    config = transformers.LlavaOnevisionConfig(
        text_config=_text("qwen2", tokenizer), vision_config={**SIGLIP, "vision_use_head": False},
        image_grid_pinpoints=PINPOINTS, image_token_id=ids("<image>"), video_token_id=ids("<video>"),
    )  # fmt: skip
    images = _images("llava_onevision", "LlavaOnevision", image_grid_pinpoints=PINPOINTS, size=_size(32, 32))
    given = {"num_image_tokens": 16, "vision_feature_select_strategy": "full"}
    return _made("llava_onevision", config, images, tokenizer, "<image>", **given)


def _idefics2() -> _Parts:
    tokenizer = _tokenizer("<fake_token_around_image>", "<image>", "<end_of_utterance>")
    perceiver = {"hidden_size": 64, "resampler_n_latents": 4, "resampler_depth": 1, "resampler_n_heads": 2,
                 "resampler_head_dim": 16, "num_key_value_heads": 1}  # fmt: skip
    config = transformers.Idefics2Config(
        text_config=_text("mistral", tokenizer, sliding_window=None), perceiver_config=perceiver,
        vision_config={**TOWER, "image_size": 64, "patch_size": 8},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    images = _images("idefics2", "Idefics2", size={"shortest_edge": 32, "longest_edge": 64})
    return _made("idefics2", config, images, tokenizer, "<image>", image_seq_len=4)


def _ovis2() -> _Parts:
    marks = ["<IMG_START>", "<IMG_GRID>", "<IMG_COL>", "<IMG_ROW>", "<IMG_END>"]
    tokenizer = _tokenizer("<image>", "<IMG_ATOM>", *marks)
    ids = tokenizer.convert_tokens_to_ids
    config = transformers.Ovis2Config(
        text_config=_text("qwen2", tokenizer), hidden_size=64, vocab_size=len(tokenizer),
        vision_config={**TOWER, "image_size": 32, "patch_size": 8, "vocab_size": 24, "hidden_stride": 2},
        image_token_id=ids("<IMG_ATOM>"), visual_indicator_token_ids=ids(marks), tie_word_embeddings=False,
    )  # fmt: skip
    images = _images("ovis2", "Ovis2", size=_size(32, 32), crop_to_patches=True, max_patches=4)
    return _made("ovis2", config, images, tokenizer, "<image>", image_seq_length=4)


def _perception_lm() -> _Parts:
    tokenizer = _tokenizer(image_token="<|image|>", video_token="<|video|>")
    tower = {"model_type": "timm_wrapper", "architecture": "vit_pe_core_tiny_patch16_384", "num_features": 32,
             "model_args": {"embed_dim": 32, "depth": 2, "num_heads": 2, "img_size": [32, 32], "patch_size": 8,
                            "use_post_transformer_norm": False, "global_pool": "", "ref_feat_shape": [4, 4]},
    }  # fmt: skip
    config = transformers.PerceptionLMConfig(
        text_config=_text("llama", tokenizer), vision_config=tower, projector_pooling_ratio=2,
        image_token_id=tokenizer.image_token_id, video_token_id=tokenizer.video_token_id,
    )  # fmt: skip
    images = transformers.PerceptionLMImageProcessor(tile_size=32, max_num_tiles=4)
    return _made("perception_lm", config, images, tokenizer, "<|image|>", patch_size=8, pooling_ratio=2)


def _fast_vlm() -> _Parts:
    tokenizer = _tokenizer("<image>")
    tower = {"model_type": "timm_wrapper", "architecture": "fastvit_mci3", "do_pooling": True, "global_pool": "avg",
             "hidden_size": 128, "model_args": {"inference_mode": True, "layers": [1, 1, 1, 1, 1],
                                                "embed_dims": [4, 8, 16, 32, 64], "mlp_ratios": [2, 2, 2, 2, 2]},
    }  # fmt: skip
    config = transformers.FastVlmConfig(
        text_config=_text("qwen2", tokenizer), vision_config=tower, image_seq_length=4,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    images = _images("clip", "CLIP", size={"shortest_edge": 128}, crop_size=_size(128, 128))
    given = {"patch_size": 64, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return _made("llava", config, images, tokenizer, "<image>", **given)


def _video_llama_3() -> _Parts:
    tokenizer = _tokenizer(image_token="<|image_pad|>", video_token="<|video_pad|>")
    config = transformers.VideoLlama3Config(
        text_config=_text("qwen2", tokenizer), vision_config={**TOWER, "patch_size": 8},
        image_token_id=tokenizer.image_token_id, video_token_id=tokenizer.video_token_id,
    )  # fmt: skip
    size = AREA
    images = _images("video_llama_3", "VideoLlama3", patch_size=8, merge_size=2, size=size)
    return _made("video_llama_3", config, images, tokenizer, "<|image_pad|>")


def _aria() -> _Parts:
    tokenizer = _tokenizer(image_token="<|img|>")
    text = _text("aria_text", tokenizer, moe_num_experts=4, moe_topk=2, moe_num_shared_experts=1)
    config = transformers.AriaConfig(
        text_config=text, vision_config={**TOWER, "model_type": "idefics3_vision", "image_size": 980, "patch_size": 70},
        image_token_id=tokenizer.image_token_id, projector_patch_to_query_dict={49: 4, 196: 8},
    )  # fmt: skip
    images = _images("aria", "Aria", max_image_size=490, min_image_size=32)
    return _made("aria", config, images, tokenizer, "<|img|>", size_conversion={490: 4, 980: 8})


def _deepseek_vl(kind: str = "deepseek_vl", name: str = "DeepseekVL") -> _Parts:
    tokenizer = _tokenizer(image_token="<image_placeholder>")
    high = {}
    if kind == "deepseek_vl_hybrid":
        high = {"high_res_vision_config": {**TOWER, "model_type": "sam_vision_model", "image_size": 64, "patch_size": 4,
                "output_channels": 16, "window_size": 4, "mlp_dim": 48, "global_attn_indexes": [1]}}  # fmt: skip
    config = getattr(transformers, f"{name}Config")(
        text_config=_text("llama", tokenizer), vision_config=SIGLIP, image_token_id=tokenizer.image_token_id,
        tie_word_embeddings=False, **high,
    )  # fmt: skip
    images = _images(kind, name, size=_size(32, 32), **({"high_res_size": _size(64, 64)} if high else {}))
    return _made(kind, config, images, tokenizer, "<image_placeholder>", num_image_tokens=16)


def _janus() -> _Parts:
    tokenizer = _tokenizer(image_token="<image_placeholder>", boi_token="<begin_of_image>", eoi_token="<end_of_image>")
    tower = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "image_size": 32, "patch_size": 8,
             "mlp_ratio": 2.0, "projection_dim": 64, "num_image_tokens": 16}  # fmt: skip
    codes = {"embed_dim": 8, "num_embeddings": 16, "latent_channels": 32, "base_channels": 32,
             "channel_multiplier": [1, 1], "num_res_blocks": 1, "projection_dim": 64, "image_token_embed_dim": 64,
    }  # fmt: skip
    config = transformers.JanusConfig(
        text_config=_text("llama", tokenizer), vision_config=tower, vq_config=codes,
        image_token_id=tokenizer.image_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    images = _images("janus", "Janus", size=_size(32, 32))
    return _made("janus", config, images, tokenizer, "<image_placeholder>", num_image_tokens=16,
                 use_default_system_prompt=True)  # fmt: skip


MULTIPLIERS = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5}


def _granite4_vision() -> _Parts:
    tokenizer = _tokenizer("<image>")
    text = _text("granite4_vision_text", tokenizer, **MULTIPLIERS, attention_multiplier=0.2, num_hidden_layers=4)
    config = transformers.Granite4VisionConfig(
        text_config=text, vision_config={**CLIP, "hidden_size": 64, "image_size": 32}, image_grid_pinpoints=PINPOINTS,
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"), downsample_rate="1/2",
        deepstack_layer_map=[[-2, 0], [-1, 2]], spatial_target_layers=[0, 1, 2, 3],
        qformer_config={"model_type": "blip_2_qformer", "num_hidden_layers": 1, "intermediate_size": 48,
                        "cross_attention_frequency": 1, "use_qformer_text_input": False},
    )  # fmt: skip
    crop = {"size": {"shortest_edge": 32}, "crop_size": _size(32, 32)}
    images = _images("llava_next", "LlavaNext", image_grid_pinpoints=PINPOINTS, **crop)
    given = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return _made("granite4_vision", config, images, tokenizer, "<image>", downsample_rate="1/2", **given)


def _granite_docling() -> _Parts:
    tokenizer = _tokenizer("<image>", "<fake_token_around_image>", "<global-img>", *(f"<row_{one}>" for one in TILES))
    tower = {**TOWER, "image_size": 32, "patch_size": 8, "out_hidden_size": 64, "scale_factor": 4,
             "deepstack_visual_indexes": [0, 1], "num_hidden_layers": 2}  # fmt: skip
    config = transformers.GraniteDoclingConfig(
        text_config=_text("granite_docling_text", tokenizer, **MULTIPLIERS, attention_multiplier=0.2),
        vision_config=tower, image_token_id=tokenizer.convert_tokens_to_ids("<image>"), tie_word_embeddings=False,
        pad_token_id=0,
    )  # fmt: skip
    images = _images("granite_docling", "GraniteDocling", size=_size(32, 32), max_patches=4)
    return _made("granite_docling", config, images, tokenizer, "<image>", image_seq_len=1)


def _qianfan_ocr() -> _Parts:
    tokenizer = _tokenizer(
        "<image>", start_image_token="<img>", end_image_token="</img>", context_image_token="<IMG_CONTEXT>"
    )
    config = transformers.QianfanOCRConfig(
        text_config=_text("qwen3", tokenizer), image_token_id=tokenizer.context_image_token_id, image_seq_length=4,
        vision_config={**TOWER, "image_size": [32, 32], "patch_size": [8, 8]},
    )  # fmt: skip
    images = _images("got_ocr2", "GotOcr2", size=_size(32, 32), crop_to_patches=True, max_patches=4)
    return _made("qianfan_ocr", config, images, tokenizer, "<image>", image_seq_length=4)


def _lfm3_vl() -> _Parts:
    tower = {**TOWER, "num_key_value_heads": 1, "patch_size": 8, "layer_types": ["conv", "full_attention"]}
    return _grid("lfm3_vl", "Lfm3Vl", tower, None, "lfm3", num_hidden_layers=5, sliding_window=16)


def _paligemma() -> _Parts:
    tokenizer = _tokenizer(image_token="<image>")
    config = transformers.PaliGemmaConfig(
        text_config=_text("gemma", tokenizer), vision_config={**SIGLIP, "vision_use_head": False}, projection_dim=64,
        image_token_id=tokenizer.image_token_id, hidden_size=64, vocab_size=len(tokenizer), tie_word_embeddings=False,
    )  # fmt: skip
    images = _images("siglip", "Siglip", size=_size(32, 32))
    images.image_seq_length = 16
    return _made("paligemma", config, images, tokenizer, "<image>")


def _gemma3() -> _Parts:
    """With the windows that GGUF files imply."""
    tokenizer = _tokenizer(
        boi_token="<start_of_image>", eoi_token="<end_of_image>", image_token="<image_soft_token>"
    )  # fmt: skip
    layers = ["sliding_attention"] * 5 + ["full_attention"]
    own = {"num_hidden_layers": 6, "layer_types": layers, "sliding_window": 16, "query_pre_attn_scalar": 16}
    config = transformers.Gemma3Config(
        text_config=_text("gemma3_text", tokenizer, **own | {"tie_word_embeddings": True}), mm_tokens_per_image=4,
        vision_config={**TOWER, "image_size": 32, "patch_size": 8, "vision_use_head": False},
        image_token_id=tokenizer.image_token_id, tie_word_embeddings=True,
    )  # fmt: skip
    images = _images("gemma3", "Gemma3", size=_size(32, 32), image_seq_length=4)
    return _made("gemma3", config, images, tokenizer, "<start_of_image>", image_seq_length=4)


def _by_torchvision(module: str, name: str, **settings: Any) -> Any:
    """An image processor that needs torchvision."""
    return getattr(import_module(f"transformers.models.{module}.image_processing_{module}"), name)(**settings)


def _llama4() -> _Parts:
    tokenizer = _tokenizer(
        "<|image|>", "<|patch|>", "<|image_start|>", "<|image_end|>", "<|tile_x_separator|>", "<|tile_y_separator|>"
    )
    text = {
        "intermediate_size_mlp": 96, "num_local_experts": 4, "num_experts_per_tok": 1, "moe_layers": [1],
        "attention_chunk_size": 32, "floor_scale": 16, "no_rope_layers": [1, 0],
    }  # fmt: skip
    config = transformers.Llama4Config(
        text_config=_text("llama4_text", tokenizer, **text),
        vision_config={**TOWER, "image_size": 32, "patch_size": 8, "vision_output_dim": 32, "projector_input_dim": 32,
                       "projector_output_dim": 32, "intermediate_size": 128},
        image_token_index=tokenizer.convert_tokens_to_ids("<|patch|>"),
    )  # fmt: skip
    images = _by_torchvision("llama4", "Llama4ImageProcessor", size=_size(32, 32), max_patches=4)
    return _made("llama4", config, images, tokenizer, "<|image|>", patch_size=8)


def _ernie4_5_vl_moe() -> _Parts:
    tokenizer = _tokenizer(
        image_token="<|IMAGE_PLACEHOLDER|>", image_start_token="<|IMAGE_START|>", image_end_token="<|IMAGE_END|>",
        video_token="<|VIDEO|>", video_start_token="<|VIDEO_START|>", video_end_token="<|VIDEO_END|>",
    )  # fmt: skip
    text = {"moe_intermediate_size": [64, 32], "moe_num_experts": 4, "moe_k": 2, "moe_num_shared_experts": 1}
    marks = {f"{one}_token_id": getattr(tokenizer, f"{one}_token_id")
             for one in ("image", "image_start", "image_end", "video", "video_start", "video_end")}  # fmt: skip
    config = transformers.Ernie4_5_VLMoeConfig(
        text_config=_text("ernie4_5_vl_moe_text", tokenizer, **_rope({"mrope_section": [3, 3, 2]}), **text),
        vision_config={"hidden_size": 32, "depth": 2, "num_heads": 2, "intermediate_size": 48, "patch_size": 8},
        tie_word_embeddings=False, **marks,
    )  # fmt: skip
    images = _images("ernie4_5_vl_moe", "Ernie4_5_VLMoe", patch_size=8, merge_size=2, size=AREA)
    return _made("ernie4_5_vl_moe", config, images, tokenizer, "<|IMAGE_START|><|IMAGE_PLACEHOLDER|><|IMAGE_END|>")


def _hunyuan_vl() -> _Parts:
    tokenizer = _tokenizer(image_token="<img>", image_start_token="<img_start>", image_end_token="<img_end>")
    rope = {"rope_type": "dynamic", "alpha": 8.0, "factor": 1.0, "mrope_section": [2, 2, 2, 2]}
    config = transformers.HunYuanVLConfig(
        text_config=_text("hunyuan_vl_text", tokenizer, **_rope(rope)),
        vision_config={**TOWER, "patch_size": 8, "spatial_merge_size": 2, "max_image_size": 64, "min_image_size": 16,
                       "out_hidden_size": 64},
        image_token_id=tokenizer.image_token_id, im_start_id=tokenizer.image_start_token_id,
        im_end_id=tokenizer.image_end_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    images = _images("hunyuan_vl", "HunYuanVL", patch_size=8, merge_size=2, size=AREA)
    return _made("hunyuan_vl", config, images, tokenizer, "<img_start><img><img_end>")


def _minicpmv4_6() -> _Parts:
    tokenizer = _tokenizer(
        image_token="<image_pad>", video_token="<video_pad>", image_start_token="<image>", image_end_token="</image>",
        slice_start_token="<slice>", slice_end_token="</slice>", image_id_start_token="<image_id>",
        image_id_end_token="</image_id>",
    )  # fmt: skip
    linear = {"linear_key_head_dim": 16, "linear_value_head_dim": 16, "linear_num_key_heads": 2}
    linear |= {"linear_num_value_heads": 4, "layer_types": ["linear_attention", "full_attention"]}
    config = transformers.MiniCPMV4_6Config(
        text_config=_text("qwen3_5_text", tokenizer, **linear, **_rope({"partial_rotary_factor": 0.5})),
        vision_config={**TOWER, "image_size": 64, "patch_size": 8}, insert_layer_id=0, image_size=64,
        image_token_id=tokenizer.image_token_id, video_token_id=tokenizer.video_token_id,
    )  # fmt: skip
    images = _images("minicpmv4_6", "MiniCPMV4_6", scale_resolution=32, patch_size=8, max_slice_nums=4)
    return _made("minicpmv4_6", config, images, tokenizer, "<image_pad>")


def _molmo2() -> _Parts:
    tokenizer = _tokenizer(
        "<im_patch>", "<im_col>", "<im_start>", "<low_res_im_start>", "<frame_start>", "<im_end>", "<frame_end>",
        "<im_low>", image_token="<|image|>", video_token="<|video|>",
    )  # fmt: skip
    ids = tokenizer.convert_tokens_to_ids
    tower = {**TOWER, "head_dim": 16, "num_key_value_heads": 2, "image_size": [32, 32], "patch_size": 8}
    adapter = {"hidden_size": 32, "head_dim": 16, "num_attention_heads": 2, "num_key_value_heads": 2,
               "intermediate_size": 48, "text_hidden_size": 64, "vision_feature_layer": [1, 0]}  # fmt: skip
    config = transformers.Molmo2Config(
        text_config=_text("molmo2_text", tokenizer, additional_vocab_size=len(tokenizer)), vision_config=tower,
        adapter_config=adapter, image_patch_id=ids("<im_patch>"), image_start_token_id=ids("<im_start>"),
        low_res_image_start_token_id=ids("<low_res_im_start>"), image_end_token_id=ids("<im_end>"),
        frame_start_token_id=ids("<frame_start>"), frame_end_token_id=ids("<frame_end>"),
    )  # fmt: skip
    images = _by_torchvision(
        "molmo2", "Molmo2ImageProcessor", size=_size(32, 32), patch_size=8, max_crops=4, overlap_margins=[1, 1]
    )
    return _made("molmo2", config, images, tokenizer, "<|image|>")


def _omni(kind: str, name: str, tower: dict[str, Any], rope: dict[str, Any], **text: Any) -> _Parts:
    """The part of a model of text, pictures and sound that answers in text."""
    tokenizer = _tokenizer(
        image_token="<|IMAGE|>", video_token="<|VIDEO|>", audio_token="<|AUDIO|>", vision_bos_token="<|vision_bos|>",
        vision_eos_token="<|vision_eos|>", audio_bos_token="<|audio_bos|>", audio_eos_token="<|audio_eos|>",
    )  # fmt: skip
    audio = {"d_model": 32, "encoder_layers": 1, "encoder_attention_heads": 2, "encoder_ffn_dim": 48,
             "output_dim": 64, "num_mel_bins": 16, "downsample_hidden_size": 16}  # fmt: skip
    config = getattr(transformers, f"{name}ThinkerConfig")(
        text_config=_text(f"{kind}_text", tokenizer, **_rope(rope), **text), vision_config=tower, audio_config=audio,
        image_token_id=tokenizer.image_token_id, video_token_id=tokenizer.video_token_id,
        audio_token_id=tokenizer.audio_token_id, vision_start_token_id=tokenizer.vision_bos_token_id,
        vision_end_token_id=tokenizer.vision_eos_token_id, audio_start_token_id=tokenizer.audio_bos_token_id,
        audio_end_token_id=tokenizer.audio_eos_token_id,
    )  # fmt: skip
    images = _images("qwen2_vl", "Qwen2VL", patch_size=8, merge_size=2, temporal_patch_size=2, size=AREA)
    sounds = transformers.WhisperFeatureExtractor(feature_size=16)
    mark = "<|vision_bos|><|IMAGE|><|vision_eos|>"
    return _made(f"{kind}_thinker", config, images, tokenizer, mark, feature_extractor=sounds)


def _qwen2_5_omni() -> _Parts:
    tower = {**QWEN_TOWER, "window_size": 32, "fullatt_block_indexes": [1]}
    return _omni("qwen2_5_omni", "Qwen2_5Omni", tower, {"mrope_section": [2, 3, 3]})


def _qwen3_omni_moe() -> _Parts:
    tower = {**QWEN_TOWER, "depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 2]}
    rope = {"mrope_section": [4, 2, 2], "mrope_interleaved": True}
    return _omni("qwen3_omni_moe", "Qwen3OmniMoe", tower, rope, **EXPERTS)


def _hyperclovax_vision_v2() -> _Parts:
    tower = {**QWEN_TOWER, "model_type": "qwen2_5_vl_vision", "window_size": 32, "fullatt_block_indexes": [1]}
    return _grid("hyperclovax_vision_v2", "HyperCLOVAXVisionV2", tower, {}, "hyperclovax")


def _minimax_m3_vl() -> _Parts:
    processor = transformers.MiniMaxM3VLProcessor
    marks = processor.IMAGE_TOKEN, processor.VIDEO_TOKEN, processor.VISION_START_TOKEN, processor.VISION_END_TOKEN
    tokenizer = _tokenizer(*marks)
    ids = tokenizer.convert_tokens_to_ids
    text = {
        "dense_intermediate_size": 96, "shared_intermediate_size": 32, "num_local_experts": 4,
        "num_experts_per_tok": 2, "rotary_dim": 8, "layer_types": ["full_attention", "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"], "index_n_heads": 2, "index_head_dim": 16,
    }  # fmt: skip
    config = transformers.MiniMaxM3VLConfig(
        text_config=_text("minimax_m3_vl_text", tokenizer, **text),
        vision_config={**TOWER, "image_size": 64, **PATCHES, "num_attention_heads": 1}, projector_hidden_size=64,
        image_token_index=ids(marks[0]), video_token_index=ids(marks[1]),
    )  # fmt: skip
    images = _by_torchvision(
        "minimax_m3_vl", "MiniMaxM3VLImageProcessor", patch_size=8, merge_size=2, temporal_patch_size=2, size=AREA
    )
    return _made("minimax_m3_vl", config, images, tokenizer, marks[0])


def _step3p7() -> _Parts:
    tokenizer = _tokenizer("<im_patch>", "<patch_start>", "<patch_end>", "<patch_newline>", "<im_start>", "<im_end>")
    text = {
        "layer_types": ["sliding_attention", "full_attention"], "sliding_window": 16, "n_routed_experts": 4,
        "num_experts_per_tok": 2, "moe_intermediate_size": 32, "share_expert_dim": 32,
        "mlp_layer_types": ["dense", "sparse"], "query_pre_attn_scalar": 16,
    }  # fmt: skip
    config = transformers.Step3p7Config(
        text_config=_text("step3p5", tokenizer, **text),
        vision_config={**TOWER, "image_size": 64, "patch_size": 8, "max_position_embeddings": 64, "mlp_ratio": 1.5},
        image_token_id=tokenizer.convert_tokens_to_ids("<im_patch>"),
    )  # fmt: skip
    images = _by_torchvision("step3p7", "Step3p7ImageProcessor", size=_size(64, 64), patch_size=32)
    images.vision_patch_size, images.max_image_size = 8, 128
    return _made("step3p7", config, images, tokenizer, "<im_patch>")


def _nemotron_h_omni() -> _Parts:
    tokenizer = _tokenizer(
        "<so_start>", "<so_end>", image_token="<image>", video_token="<video>", audio_token="<so_embedding>",
        image_start_token="<img>", image_end_token="</img>",
    )  # fmt: skip
    text = {
        "num_hidden_layers": 4, "layers_block_type": ["mamba", "moe", "attention", "mamba"], "mamba_num_heads": 8,
        "mamba_head_dim": 16, "ssm_state_size": 16, "n_groups": 2, "n_routed_experts": 4, "num_experts_per_tok": 2,
        "moe_intermediate_size": 32, "moe_shared_expert_intermediate_size": 32,
    }  # fmt: skip
    config = transformers.NemotronH_Omni_Reasoning_V3_Config(
        text_config=_text("nemotron_h", tokenizer, **text), audio_config=None, projector_hidden_size=32,
        vision_config={**TOWER, "model_type": "radio", "patch_size": 8, "image_size": 64, "max_img_size": 64,
                       "video_temporal_patch_size": 2},
        vision_hidden_size=32, image_token_id=tokenizer.image_token_id, video_token_id=tokenizer.video_token_id,
        audio_token_id=tokenizer.audio_token_id,
    )  # fmt: skip
    images = _by_torchvision(
        "nemotron_h_omni", "NemotronH_Omni_Reasoning_V3ImageProcessor", patch_size=8, min_num_patches=16,
        max_num_patches=64,
    )  # fmt: skip
    sounds = transformers.ParakeetFeatureExtractor()
    return _made("nemotron_h_omni", config, images, tokenizer, "<image>", feature_extractor=sounds)


def _gemma4_unified() -> _Parts:
    tokenizer = _tokenizer(
        boi_token="<|image>", eoi_token="<image|>", image_token="<|image|>", audio_token="<|audio|>",
        boa_token="<|audio>", eoa_token="<audio|>",
    )  # fmt: skip
    text = {**WINDOW, "sliding_window": 72, "global_head_dim": 16}  # an image has 64 tokens
    config = transformers.Gemma4UnifiedConfig(
        text_config=_text("gemma4_unified_text", tokenizer, **text), audio_config=None,
        vision_config={"patch_size": 8, "pooling_kernel_size": 2, "mm_embed_dim": 32, "mm_posemb_size": 64,
                       "output_proj_dims": 32},
        image_token_id=tokenizer.image_token_id, boi_token_id=tokenizer.boi_token_id,
        eoi_token_id=tokenizer.eoi_token_id, audio_token_id=tokenizer.audio_token_id, video_token_id=None,
        tie_word_embeddings=False,
    )  # fmt: skip
    images = _by_torchvision(
        "gemma4_unified", "Gemma4UnifiedImageProcessor", patch_size=8, pooling_kernel_size=2, max_soft_tokens=70
    )
    sounds = transformers.Gemma4AudioFeatureExtractor()
    given = {"feature_extractor": sounds, "video_processor": None}
    return _made("gemma4_unified", config, images, tokenizer, "<|image|>", **given)


def _gemma3n() -> _Parts:
    marks = {"image_token": "<|image|>", "eoi_token": "<image|>", "audio_token": "<|audio|>", "eoa_token": "<audio|>"}
    tokenizer = _tokenizer(are_last=True, boi_token="<|image>", boa_token="<|audio>", **marks)
    size = len(tokenizer) - len(marks)  # tokens from here on are embedded beside the language model
    text = {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 16,
        "num_kv_shared_layers": 2, "activation_sparsity_pattern": [0.5] * 4, "intermediate_size": 96,
        "vocab_size_per_layer_input": size, "hidden_size_per_layer_input": 16, "laurel_rank": 16,
    }  # fmt: skip
    config = transformers.Gemma3nConfig(
        text_config=_text("gemma3n_text", tokenizer) | text,
        audio_config={"hidden_size": 32, "conf_num_attention_heads": 2, "conf_num_hidden_layers": 1, "vocab_size": 2,
                      "vocab_offset": size + 2, "sscp_conv_channel_size": [16, 8]},
        vision_config={"architecture": "mobilenetv5_300m_enc", "vocab_size": 2, "vocab_offset": size,
                       "hidden_size": 2048},
        vision_soft_tokens_per_image=256, image_token_id=tokenizer.image_token_id, boi_token_id=tokenizer.boi_token_id,
        eoi_token_id=tokenizer.eoi_token_id, audio_token_id=tokenizer.audio_token_id, tie_word_embeddings=False,
    )  # fmt: skip
    images = _images("siglip", "Siglip", size=_size(64, 64), do_normalize=False)
    sounds = transformers.Gemma3nAudioFeatureExtractor()
    return _made("gemma3n", config, images, tokenizer, "<|image|>", feature_extractor=sounds, image_seq_length=256)


def _cohere_compass() -> _Parts:
    begin, end = "<|VISION_START|>", "<|VISION_END|>"
    tokenizer = _tokenizer(begin, end, image_token="<|IMAGE_PAD|>", video_token="<|VIDEO_PAD|>")
    kinds = ["sliding_attention", "full_attention"]
    rope = {"rope_type": "default", "rope_theta": 30.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    text = {**WINDOW, "rope_parameters": dict.fromkeys(kinds, rope)}
    config = transformers.CohereCompassConfig(
        text_config=_text("cohere_compass_text", tokenizer, **text), image_token_id=tokenizer.image_token_id,
        vision_config={**QWEN_TOWER, "depth": 3, "num_position_embeddings": 64, "deepstack_visual_indexes": [0, 1]},
        video_token_id=tokenizer.video_token_id,
        vision_start_token_id=tokenizer.convert_tokens_to_ids(begin),
        vision_end_token_id=tokenizer.convert_tokens_to_ids(end),
    )  # fmt: skip
    images = _images("cohere_compass", "CohereCompass", patch_size=8, merge_size=2, temporal_patch_size=2, size=AREA)
    return _made("cohere_compass", config, images, tokenizer, f"{begin}<|IMAGE_PAD|>{end}")


def _deepseek_ocr2() -> _Parts:
    tokenizer = _tokenizer("<image>")
    text = {"n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1,
            "num_key_value_heads": 4, "mlp_layer_types": ["dense", "sparse"]}  # fmt: skip
    tower = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    sam = {"output_channels": 16, "window_size": 8, "global_attn_indexes": [1], "mlp_dim": 48,
           "downsample_channels": [16, 32]}  # fmt: skip
    encoder = {"intermediate_size": 48, "num_key_value_heads": 2, "vocab_size": 8}
    config = transformers.DeepseekOcr2Config(
        text_config=_text("deepseek_ocr2_text", tokenizer) | text,
        vision_config={"sam_config": {**tower, **sam}, "encoder_config": {**tower, **encoder}},
        image_token_id=tokenizer.convert_tokens_to_ids("<image>"),
    )  # fmt: skip
    images = _images("deepseek_ocr2", "DeepseekOcr2")  # its tower has queries for this size only
    return _made("deepseek_ocr2", config, images, tokenizer, "<image>")


def _mistral_large4() -> _Parts:
    text = {"kv_lora_rank": 16, "qk_nope_head_dim": 16, "qk_rope_head_dim": 8, "v_head_dim": 16, "head_dim": 8,
            "num_key_value_heads": 4, "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
            "index_head_dim": 16, "index_n_heads": 2}  # fmt: skip
    return _mistral3("mistral_large4", "MistralLarge4", "mistral_large4_text", text)


def _mllama() -> _Parts:
    tokenizer = _tokenizer("<|image|>", "<|python_tag|>")
    tower = {
        **TOWER, "image_size": 32, "patch_size": 8, "num_global_layers": 1, "vision_output_dim": 64,
        "intermediate_layers_indices": [0], "supported_aspect_ratios": [[1, 1], [1, 2], [2, 1]], "max_num_tiles": 2,
    }  # fmt: skip
    config = transformers.MllamaConfig(
        text_config=_text("mllama_text_model", tokenizer, cross_attention_layers=[1]), vision_config=tower,
        image_token_index=tokenizer.convert_tokens_to_ids("<|image|>"),
    )  # fmt: skip
    images = _images("mllama", "Mllama", size=_size(32, 32), max_image_tiles=2)
    return _made("mllama", config, images, tokenizer, "<|image|>")


MAKERS: dict[str, Callable[[], _Parts]] = {
    "aria": _aria,
    "aya_vision": _aya_vision,
    "cohere2_vision": _cohere2_vision,
    "cohere_compass": _cohere_compass,
    "deepseek_ocr2": _deepseek_ocr2,
    "deepseek_vl": _deepseek_vl,
    "deepseek_vl_hybrid": lambda: _deepseek_vl("deepseek_vl_hybrid", "DeepseekVLHybrid"),
    "ernie4_5_vl_moe": _ernie4_5_vl_moe,
    "exaone4_5": _exaone4_5,
    "fast_vlm": _fast_vlm,
    "gemma3": _gemma3,
    "gemma3n": _gemma3n,
    "gemma4_unified": _gemma4_unified,
    "glm46v": lambda: _glm4v("glm46v", "Glm46V", "glm4v_text"),
    "glm4v": _glm4v,
    "glm4v_moe": _glm4v_moe,
    "glm_ocr": _glm_ocr,
    "glmga": lambda: _glm4v("glmga", "Glmga", "glm4v_text"),
    "got_ocr2": _got_ocr2,
    "granite4_vision": _granite4_vision,
    "granite_docling": _granite_docling,
    "hunyuan_vl": _hunyuan_vl,
    "hyperclovax_vision_v2": _hyperclovax_vision_v2,
    "idefics2": _idefics2,
    "idefics3": _idefics3,
    "internvl": _internvl,
    "janus": _janus,
    "kimi_k25": _kimi_k25,
    "lfm2_vl": _lfm2_vl,
    "lfm3_vl": _lfm3_vl,
    "lighton_ocr": _lighton_ocr,
    "llama4": _llama4,
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_next_video": lambda: _llava_next("llava_next_video", "LlavaNextVideo"),
    "llava_onevision": _llava_onevision,
    "minicpmv4_6": _minicpmv4_6,
    "minimax_m3_vl": _minimax_m3_vl,
    "mistral3": _mistral3,
    "mistral_large4": _mistral_large4,
    "mllama": _mllama,
    "molmo2": _molmo2,
    "nemotron_h_omni": _nemotron_h_omni,
    "ovis2": _ovis2,
    "paddleocr_vl": _paddleocr_vl,
    "paligemma": _paligemma,
    "perception_lm": _perception_lm,
    "qianfan_ocr": _qianfan_ocr,
    "qwen2_5_omni_thinker": _qwen2_5_omni,
    "qwen2_5_vl": _qwen2_5_vl,
    "qwen2_vl": _qwen2_vl,
    "qwen3_5": _qwen3_5,
    "qwen3_5_moe": lambda: _qwen3_5("qwen3_5_moe", "Qwen3_5Moe", **EXPERTS, shared_expert_intermediate_size=32),
    "qwen3_omni_moe_thinker": _qwen3_omni_moe,
    "qwen3_vl": _qwen3_vl,
    "qwen3_vl_moe": lambda: _qwen3_vl("qwen3_vl_moe", "Qwen3VLMoe", **EXPERTS),
    "smolvlm": lambda: _idefics3("smolvlm", "SmolVLM"),
    "step3p7": _step3p7,
    "video_llama_3": _video_llama_3,
    "video_llava": lambda: _llava("video_llava", "VideoLlava"),
    "vipllava": _vipllava,
}

_GRID = {"patch_size": 8, "merge_size": 2, "temporal_patch_size": 2, "fps": 4}
VIDEOS: dict[str, Callable[[], Any]] = {
    "glm4v": lambda: transformers.Glm4vVideoProcessor(**_GRID, size={"shortest_edge": 512, "longest_edge": 8192}),
    "glm46v": lambda: transformers.Glm46VVideoProcessor(**_GRID, size={"shortest_edge": 512, "longest_edge": 8192}),
    "internvl": lambda: transformers.InternVLVideoProcessor(size=_size(32, 32), num_frames=3),
    "kimi_k25": lambda: transformers.Kimi_K25VideoProcessor(patch_size=8, max_patches=64),
    "qwen2_vl": lambda: transformers.Qwen2VLVideoProcessor(**_GRID, size={"shortest_edge": 256, "longest_edge": 4096}),
    "qwen3_vl": lambda: transformers.Qwen3VLVideoProcessor(**_GRID, size={"shortest_edge": 512, "longest_edge": 8192}),
    "smolvlm": lambda: transformers.SmolVLMVideoProcessor(
        max_image_size={"longest_edge": 32}, size={"longest_edge": 32},
        video_sampling={"max_frames": 3, "fps": 4, "video_size": {"longest_edge": 32}},
    ),
}  # fmt: skip
"""Processors of videos, by types of models. They need torchvision."""

VIDEOS |= dict.fromkeys(["exaone4_5", "qwen2_5_vl"], VIDEOS["qwen2_vl"])
VIDEOS |= dict.fromkeys(["qwen3_5", "qwen3_5_moe", "qwen3_vl_moe"], VIDEOS["qwen3_vl"])
VIDEOS |= {"glm4v_moe": VIDEOS["glm4v"], "glm_ocr": VIDEOS["glm46v"]}

BY_TORCHVISION = [
    "cohere2_vision", "gemma4_unified", "kimi_k25", "lfm2_vl", "llama4", "minimax_m3_vl", "mistral3", "mistral_large4",
    "molmo2", "nemotron_h_omni", "step3p7",
]  # fmt: skip
PACKAGES = {
    **{kind: ["torchvision"] for kind in BY_TORCHVISION},
    **{kind: ["timm", "torchvision"] for kind in ("fast_vlm", "gemma3n", "perception_lm")},
    "smolvlm": ["num2words", "torchvision"],
}
"""Packages that the processors of some need in transformers."""


SEEDS = {"hyperclovax_vision_v2": 1, "kimi_k25": 5, "minicpmv4_6": 2, "nemotron_h_omni": 1}
"""Of weights with which a model neither says placeholders, which are blanked, nor the same of all pictures."""


def save_vision_model(folder: Path, kind: str, parts: _Parts | None = None) -> Path:
    """A tiny random model of a type and its processor."""
    parts = parts or MAKERS[kind]()
    torch.manual_seed(0)
    network = transformers.AutoModelForImageTextToText.from_config(parts.config).eval()
    kept = {name: one.clone() for name, one in network.state_dict().items() if kind == "gemma3n" and "timm" in name}
    draw_weights(network, SEEDS.get(kind, 0))
    network.load_state_dict(kept, strict=False)  # its many layers would make chaos of rounding errors
    network.save_pretrained(folder)
    if kind in WRONGLY_SAVED:
        path = folder / "model.safetensors"
        saved, published = f"language_model.model{WRONGLY_SAVED[kind]}", "language_model.model.layers."
        tensors = {name.replace(saved, published): tensor for name, tensor in load_file(path).items()}
        save_file(tensors, path, {"format": "pt"})
    transformers.ProcessorMixin.save_pretrained(parts.processor, folder)  # that of some copies a font for videos
    return folder


def picture(seed: int, height: int, width: int) -> str:
    """A file of random pixels as base64."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return b64encode(file.getvalue()).decode()


FPS = 10.0
"""Frames of a clip that are shown in a second."""


def frames(seed: int, count: int, height: int = 40, width: int = 56) -> Any:
    """Random pixels."""
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, 3), dtype=np.uint8)


def animation(pixels: Any, kind: str = "PNG", **options: Any) -> bytes:
    """A file of frames."""
    first, *others = map(Image.fromarray, pixels)
    file = BytesIO()
    first.save(file, kind, save_all=True, append_images=others, **{"duration": 1000 / FPS, **options})
    return file.getvalue()


def clip(seed: int, count: int, height: int = 40, width: int = 56) -> str:
    """A video of random pixels as base64."""
    return b64encode(animation(frames(seed, count, height, width))).decode()


def message(role: str, *parts: str) -> dict[str, Any]:
    """A message of texts, pictures and clips, of which texts are shorter."""

    def part(given: str) -> dict[str, Any]:
        if len(given) <= 100:
            return {"type": "text", "text": given}
        return {"type": "video" if b"acTL" in b64decode(given) else "image", "base64": given}

    return {"role": role, "content": [*map(part, parts)]}


KINDS = ("image", "video")


class Reference:
    """A model by transformers alone, from its folder."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._network = transformers.AutoModelForImageTextToText.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        )
        transformers.modeling_outputs.MoeCausalLMOutputWithPast.image_outputs = None  # which that of Llama 4 asks for
        self._processor = load_processor(self._network.config.model_type, str(folder))

    def generate(self, messages: Sequence[dict[str, Any]], length: int, answer: str = "") -> list[int]:
        """The likeliest tokens behind the beginning of an answer."""
        inputs = self._inputs(messages, answer)
        with torch.inference_mode():
            self._network.generation_config.eos_token_id = None
            found = self._network.generate(**inputs, max_new_tokens=length, do_sample=False)
        return list(found[0, inputs["input_ids"].shape[1] :].tolist())

    def score(self, messages: Sequence[dict[str, Any]], answer: str) -> float:
        """The log-probability of an answer."""
        inputs = self._inputs(messages, answer)
        asked = inputs["input_ids"][0]
        count = len(self._processor.tokenizer(answer, add_special_tokens=False)["input_ids"])
        with torch.inference_mode():
            found = self._network(**inputs).logits[0, -count - 1 : -1].log_softmax(-1)
        return float(found.gather(1, asked[-count:, None]).sum())

    def _inputs(self, messages: Sequence[dict[str, Any]], answer: str) -> Any:
        parts = [part for one in messages for part in one["content"] if part["type"] != "text"]
        files = {kind: [BytesIO(b64decode(one["base64"])) for one in parts if one["type"] == kind] for kind in KINDS}
        text = self._processor.tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        given: dict[str, Any] = {"return_tensors": "pt"}
        if not parts or text.startswith("<s>"):  # as `apply_chat_template` of processors
            given["add_special_tokens"] = False
        if files["image"]:
            images = [Image.open(file) for file in files["image"]]
            given["images"] = images if hasattr(self._processor, "multi_page") else [images]
        if files["video"]:
            if self._processor.video_processor in (None, self._processor.image_processor):
                self._processor.video_processor = transformers.AutoVideoProcessor.from_pretrained(self._folder)
            videos = [
                [np.array(one.convert("RGB")) for one in iter_frames(Image.open(file))] for file in files["video"]
            ]
            about = [{"total_num_frames": len(one), "fps": FPS, "duration": len(one) / FPS} for one in videos]
            given |= {"videos": [np.stack(one) for one in videos], "video_metadata": about, "do_sample_frames": True}
        processor = self._processor if parts else self._processor.tokenizer
        return processor(text=[text + answer], **given).to(torch.float32)  # of Llama 4 they are bfloat16
