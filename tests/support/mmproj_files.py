"""GGUF files of tiny models that take images, as llama.cpp's converter writes them: the language model, and the tower.

Names of tensors come from the table of llama.cpp's package, which knows the published names of weights.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from transformers import AutoConfig

from cbatch.model.hf.vision import processor_class
from tests.support import gguf_files
from tests.support.gguf_files import tokenizer_metadata, write_model
from tests.support.programs import SavedModel
from tests.support.vision_models import MAKERS, save_vision_model

TEXTS = {
    "gemma3": ("gemma3_text", "GEMMA3"), "idefics3": ("llama", "LLAMA"), "qwen2_5_vl": ("qwen2", "QWEN2VL"),
    "qwen2_vl": ("qwen2", "QWEN2VL"), "qwen3_5": ("qwen3_5_text", "QWEN35"), "qwen3_vl": ("qwen3", "QWEN3VL"),
}  # fmt: skip
"""Types of the language models alone, and the package's names of their architectures."""

PROJECTORS = {
    "gemma3": "gemma3", "idefics3": "idefics3", "qwen2_5_vl": "qwen2.5vl_merger", "qwen2_vl": "qwen2vl_merger",
    "qwen3_5": "qwen3vl_merger", "qwen3_vl": "qwen3vl_merger",
}  # fmt: skip
IMAGE_PIXELS = {"shortest_edge": 128 * 128, "longest_edge": 160 * 160}

Array = NDArray[Any]
Change = Callable[[str, Array], Array]


def save_folder(folder: Path, kind: str, stored: Kind = Kind.F32) -> Path:
    """A model in a folder, whose tower has numbers of a format."""
    parts = MAKERS[kind]()
    if kind == "qwen2_5_vl":  # files do not say how large windows are, and an image should have several
        parts.config.vision_config.window_size = 112
    if kind == "idefics3":  # whose patches leave a part of an image, as the published ones do
        parts.config.vision_config.image_size = 36
        parts.processor.image_processor.max_image_size = {"longest_edge": 36}
        parts.processor.image_processor.size = {"longest_edge": 72}
    if "qwen" in kind:
        parts.processor.image_processor.size = IMAGE_PIXELS
    save_vision_model(folder, kind, parts)
    path = folder / "model.safetensors"
    tensors = load_file(path)
    for name, tensor in tensors.items():
        if _is_of_tower(name):
            data, format = _stored(tensor.numpy(), stored)
            tensors[name] = torch.from_numpy(gguf.quants.dequantize(data, format).reshape(tensor.shape))
    save_file(tensors, path, {"format": "pt"})
    return folder


def _is_of_tower(name: str) -> bool:
    return re.search("visual|vision|projector|connector", name) is not None


def _stored(numbers: Array, kind: Kind) -> tuple[Array, Kind]:
    kind = kind if numbers.ndim == 2 and numbers.shape[-1] % 32 == 0 else Kind.F32
    return gguf.quants.quantize(numbers.astype(np.float32), kind), kind


def write_text(
    path: Path, folder: Path, patch: pytest.MonkeyPatch, without: str = "", *, type_of_images: int = 3
) -> None:
    """The language model of a folder, with the tokenizer.

    without:        a special token that the file lacks
    type_of_images: the number of the type of tokens of images; 4 if a user has defined them
    """
    config = AutoConfig.from_pretrained(folder)
    kind, architecture = TEXTS[config.model_type]
    patch.setitem(gguf_files.ARCHITECTURES, kind, architecture)
    tensors = {
        f"model.{match[0]}" if (match := re.search(r"(layers\.\d+|embed_tokens|norm)\..+", name)) else name: tensor
        for name, tensor in load_file(folder / "model.safetensors").items()
        if not _is_of_tower(name)
    }
    tokenizer = processor_class(config.model_type).from_pretrained(folder).tokenizer
    tokens = [one for one, _ in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])]
    tokens = tokens[: config.get_text_config().vocab_size]  # without one that its class adds
    metadata = tokenizer_metadata(tokenizer.backend_tokenizer, tokens, "gpt-2") | {
        "tokenizer.chat_template": tokenizer.chat_template, "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.add_bos_token": True, "tokenizer.ggml.eos_token_id": 2,
    }  # fmt: skip
    del metadata["tokenizer.ggml.merges"]  # there are none, and an array may not be empty
    types = metadata["tokenizer.ggml.token_type"]
    types[:] = [type_of_images if "image" in token else type for token, type in zip(tokens, types, strict=True)]
    if without:
        metadata["tokenizer.ggml.tokens"] = [one.replace(without, "<unused0>") for one in tokens]
    if levels := getattr(config.vision_config, "deepstack_visual_indexes", None):
        metadata["qwen3vl.n_deepstack_layers"] = len(levels)
    text = config.get_text_config().to_dict() | {"model_type": kind}
    write_model(path, SavedModel(None, text, tensors), metadata=metadata)


def write_tower(
    path: Path, folder: Path, stored: Kind = Kind.F32, *, is_older: bool = False, change: Change | None = None,
    metadata: Mapping[str, Any] | None = None,
) -> None:  # fmt: skip
    """The vision tower of a folder. is_older: with names of the feed-forward parts changed. change: a planted fault"""
    config = AutoConfig.from_pretrained(folder)
    writer = gguf.GGUFWriter(str(path), "clip")
    for key, value in (_metadata(config, folder) | dict(metadata or {})).items():
        if value is not None:
            form = gguf.GGUFValueType.UINT32 if type(value) is int else gguf.GGUFValueType.get_type(value)
            writer.add_key_value(key, value, form)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.MMPROJ, 32)
    tensors = {name: one.numpy() for name, one in load_file(folder / "model.safetensors").items() if _is_of_tower(name)}
    for name, array in tensors.items():
        for theirs, piece in _pieces(config, names, name, array):
            if is_older and (match := re.search("ffn_(up|down)", theirs)):
                theirs = theirs.replace(match[0], {"up": "ffn_down", "down": "ffn_up"}[match[1]])
            data, kind = _stored(change(theirs, piece) if change else piece, stored)
            writer.add_tensor(theirs, data, raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _pieces(config: Any, names: Any, name: str, array: Array) -> Iterator[tuple[str, Array]]:
    """Tensors of the file, with their names."""
    kind, name = config.model_type, name.replace("model.visual.", "visual.")
    if kind == "gemma3":
        name = name.replace("model.", "").replace("vision_tower.", "vision_tower.vision_model.")
        name = name.replace("projection_weight", "projection.weight")
        array = array + 1 if "soft_emb_norm" in name else array
    if name == "visual.patch_embed.proj.weight":
        yield "v.patch_embd.weight", array[:, :, 0]
        yield "v.patch_embd.weight.1", array[:, :, 1]
    elif "qwen3" not in kind and ".qkv." in name:
        for part, rows in zip("qkv", np.split(array, 3), strict=True):
            yield names.get_name(name.replace("qkv", part), (".weight", ".bias")), rows
    elif match := re.fullmatch(r"visual\.deepstack_merger_list\.(\d)\.(\w+)\.(\w+)", name):
        layer = config.vision_config.deepstack_visual_indexes[int(match[1])]
        yield f"v.deepstack.{layer}.{match[2].replace('linear_', '')}.{match[3]}", array
    elif "qwen3" in kind and "visual.merger" in name:
        for ours, theirs in (("visual.merger.norm", "v.post_ln"), ("visual.merger.linear_fc1", "mm.0"),
                             ("visual.merger.linear_fc2", "mm.2")):  # fmt: skip
            name = name.replace(ours, theirs)
        yield name, array
    else:
        yield names.get_name(name, (".weight", ".bias")), array


def _metadata(config: Any, folder: Path) -> dict[str, Any]:
    tower, kind = config.vision_config, config.model_type
    is_qwen, images = "qwen" in kind, processor_class(kind).from_pretrained(folder).image_processor
    layers = tower.depth if is_qwen else tower.num_hidden_layers
    found = {
        "clip.has_vision_encoder": True, "clip.projector_type": PROJECTORS[kind],
        "clip.vision.projection_dim": config.get_text_config().hidden_size,
        "clip.vision.image_size": 560 if is_qwen else tower.image_size, "clip.vision.patch_size": tower.patch_size,
        "clip.vision.embedding_length": tower.embed_dim if kind == "qwen2_vl" else tower.hidden_size,
        "clip.vision.feed_forward_length": tower.hidden_size if kind == "qwen2_vl" else tower.intermediate_size,
        "clip.vision.block_count": layers,
        "clip.vision.attention.head_count": tower.num_heads if is_qwen else tower.num_attention_heads,
        "clip.vision.attention.layer_norm_epsilon": 1e-6, "clip.vision.image_mean": list(images.image_mean),
        "clip.vision.image_std": list(images.image_std),
    }  # fmt: skip
    if is_qwen:
        found |= {"clip.vision.image_min_pixels": IMAGE_PIXELS["shortest_edge"],
                  "clip.vision.image_max_pixels": IMAGE_PIXELS["longest_edge"]}  # fmt: skip
    if kind == "gemma3":
        found["clip.vision.projector.scale_factor"] = 2
    if kind == "idefics3":
        found |= {"clip.vision.projector.scale_factor": config.scale_factor, "clip.vision.preproc_image_size": 72}
    if kind == "qwen2_5_vl":
        found["clip.vision.n_wa_pattern"] = tower.fullatt_block_indexes[0] + 1
    if "qwen3" in kind:
        flags = [layer in (getattr(tower, "deepstack_visual_indexes", None) or []) for layer in range(layers)]
        found |= {"clip.vision.spatial_merge_size": 2, "clip.vision.is_deepstack_layers": flags}
    return found
