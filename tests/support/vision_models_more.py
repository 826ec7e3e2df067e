"""Further types of `vision_models`."""

from __future__ import annotations

from collections.abc import Callable

import transformers

from tests.support.vision_models import (
    TILES,
    TOWER,
    _grid,
    _images,
    _made,
    _Parts,
    _size,
    _text,
    _tokenizer,
)

PINPOINTS = [[32, 64], [64, 32], [64, 64]]
SIGLIP = {**TOWER, "model_type": "siglip_vision_model", "image_size": 32, "patch_size": 8}
CLIP = {**SIGLIP, "model_type": "clip_vision_model", "projection_dim": 32}


def _llava_next_video() -> _Parts:
    tokenizer = _tokenizer("<image>", "<video>")
    ids = tokenizer.convert_tokens_to_ids
    config = transformers.LlavaNextVideoConfig(
        text_config=_text("llama", tokenizer), vision_config=CLIP, image_grid_pinpoints=PINPOINTS,
        image_token_id=ids("<image>"), video_token_id=ids("<video>"), image_seq_length=16,
    )  # fmt: skip
    crop = {"size": {"shortest_edge": 32}, "crop_size": _size(32, 32)}
    images = _images("llava_next", "LlavaNext", image_grid_pinpoints=PINPOINTS, **crop)
    given = {"patch_size": 8, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return _made("llava_next_video", config, images, tokenizer, "<image>", **given)


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


def _video_llava() -> _Parts:
    tokenizer = _tokenizer("<image>", "<video>")
    ids = tokenizer.convert_tokens_to_ids
    config = transformers.VideoLlavaConfig(
        text_config=_text("llama", tokenizer), vision_config=CLIP, image_token_id=ids("<image>"),
        video_token_id=ids("<video>"),
    )  # fmt: skip
    images = transformers.VideoLlavaImageProcessor(size={"shortest_edge": 32}, crop_size=_size(32, 32))
    return _made("video_llava", config, images, tokenizer, "<image>", patch_size=8)


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
    size = {"shortest_edge": 16 * 16, "longest_edge": 64 * 64}
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
    return _made("janus", config, images, tokenizer, "<image_placeholder>", num_image_tokens=16)


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


MORE: dict[str, Callable[[], _Parts]] = {
    "aria": _aria,
    "deepseek_vl": _deepseek_vl,
    "deepseek_vl_hybrid": lambda: _deepseek_vl("deepseek_vl_hybrid", "DeepseekVLHybrid"),
    "fast_vlm": _fast_vlm,
    "granite4_vision": _granite4_vision,
    "granite_docling": _granite_docling,
    "idefics2": _idefics2,
    "janus": _janus,
    "lfm3_vl": _lfm3_vl,
    "llava_next_video": _llava_next_video,
    "llava_onevision": _llava_onevision,
    "ovis2": _ovis2,
    "paligemma": _paligemma,
    "perception_lm": _perception_lm,
    "qianfan_ocr": _qianfan_ocr,
    "video_llama_3": _video_llama_3,
    "video_llava": _video_llava,
}
