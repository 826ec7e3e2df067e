"""The vision tower of a GGUF model, from the `mmproj` file that llama.cpp has for it, in a network of transformers.

Its projector says what the file holds (https://github.com/ggml-org/llama.cpp, `tools/mtmd/clip.cpp`). Settings that it
does not have are those of the published models.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cbatch.base.errors import ModelError
from cbatch.base.model_files import InvalidFile
from cbatch.media.pictures import NO_IMAGES
from cbatch.model.formats.gguf import GgufModel
from cbatch.model.formats.gguf_architectures.architecture import Config, Metadata
from cbatch.model.formats.gguf_file import GgufFile, read_gguf
from cbatch.model.hf.vision import Vision, processor_class
from cbatch.text.loading import silence_libraries

_log = logging.getLogger("cbatch")


_SIGLIP = {
    ".patch_embd": ".embeddings.patch_embedding", ".position_embd": ".embeddings.position_embedding",
    ".blk.": ".encoder.layers.", ".ln": ".layer_norm", ".post_ln": ".post_layernorm",
    ".attn_out": ".self_attn.out_proj", ".attn_q": ".self_attn.q_proj", ".attn_k": ".self_attn.k_proj",
    ".attn_v": ".self_attn.v_proj", ".ffn_up": ".mlp.fc1", ".ffn_down": ".mlp.fc2",
}  # fmt: skip
_QWEN = {
    ".v.": ".model.visual.", ".mm.": ".model.visual.merger.mlp.", ".patch_embd": ".patch_embed.proj",
    "weight.1": "weight", ".blk.": ".blocks.", ".ln": ".norm", ".post_ln": ".merger.ln_q", ".attn_out": ".attn.proj",
    ".attn_qkv": ".attn.qkv", ".attn_q": ".attn.qkv", ".attn_k": ".attn.qkv", ".attn_v": ".attn.qkv",
}  # fmt: skip
PROJECTORS: dict[str, tuple[str, str, dict[str, str]]] = {
    "gemma3": ("gemma3", "<image_soft_token> <unused0>", {
        ".v.": ".model.vision_tower.", ".mm.": ".model.multi_modal_projector.mm_",
        "projection.weight": "projection_weight", **_SIGLIP}),
    "idefics3": ("idefics3", "<image>", {
        ".v.": ".model.vision_model.", ".mm.model.fc": ".model.connector.modality_projection.proj", **_SIGLIP}),
    "qwen2vl_merger": ("qwen2_vl", "<|image_pad|>", {**_QWEN, ".ffn_up": ".mlp.fc1", ".ffn_down": ".mlp.fc2"}),
    "qwen2.5vl_merger": ("qwen2_5_vl", "<|image_pad|>", {
        **_QWEN, ".ffn_up": ".mlp.up_proj", ".ffn_down": ".mlp.down_proj", ".ffn_gate": ".mlp.gate_proj"}),
    "qwen3vl_merger": ("qwen3_vl", "<|image_pad|>", {
        ".mm.0": ".model.visual.merger.linear_fc1", ".mm.2": ".model.visual.merger.linear_fc2", **_QWEN,
        ".post_ln": ".merger.norm", ".position_embd": ".pos_embed", ".fc": ".linear_fc", ".ffn_up": ".mlp.linear_fc1",
        ".ffn_down": ".mlp.linear_fc2"}),
}  # fmt: skip
"""By `clip.projector_type`: the type of the model in transformers, its token for an image (of several the first that
there is), and what parts of tensors' names are in the network, in the order in which they are replaced."""


def _settings(kind: str, data: Metadata, width: int) -> tuple[Config, Config, Config]:
    """Of a model, of its image processor, and of the processor around that. Raises InvalidFile if tensors do not fit.

    width: of the language model
    """
    names, is_qwen = ("embedding_length", "block_count", "patch_size", "image_size"), kind.startswith("qwen")
    hidden, layers, patch, side = (data.whole(f"vision.{name}") for name in names)
    merge = data.whole("vision.spatial_merge_size", 2) if is_qwen else data.whole("vision.projector.scale_factor", 4)
    heads, up = data.whole("vision.attention.head_count"), data.shape(f"v.blk.{layers - 1}.ffn_up.weight")
    places = 0 if kind.startswith("qwen2") else data.shape("v.position_embd.weight")[0]
    fits = merge and hidden in up and patch == data.shape("v.patch_embd.weight")[-1]
    if not fits or (data.shape("mm.0.weight")[-1] != hidden * merge**2 if is_qwen else (side // patch) ** 2 != places):
        raise data.refused("claims to have other sizes than its tensors have")
    tower: Config = {
        "hidden_size": hidden, "intermediate_size": math.prod(up) // hidden, "patch_size": patch, "image_size": side,
        "num_hidden_layers": layers, "num_attention_heads": heads, "vision_use_head": False,
        "layer_norm_eps": data.number("vision.attention.layer_norm_epsilon"),
    }  # fmt: skip
    rows, images = (side // patch // merge) ** 2, {"size": {"height": side, "width": side}}
    if kind == "gemma3":
        return {"vision_config": tower, "mm_tokens_per_image": rows}, images, {"image_seq_length": rows}
    if kind == "idefics3":
        edges = {"size": data.whole("vision.preproc_image_size", 4 * side), "max_image_size": side}
        images = {name: {"longest_edge": edge} for name, edge in edges.items()}
        return {"vision_config": tower, "scale_factor": merge}, images, {"image_seq_len": rows}
    period = data.whole("vision.n_wa_pattern", None if kind == "qwen2_5_vl" else 1) or 1
    flags = data.flags("vision.is_deepstack_layers", layers) or []
    tower |= {
        "depth": layers, "num_heads": heads, "spatial_merge_size": merge, "out_hidden_size": width,
        "embed_dim": hidden, "hidden_size": width if kind == "qwen2_vl" else hidden,
        "mlp_ratio": tower["intermediate_size"] // hidden, "num_position_embeddings": places,
        "fullatt_block_indexes": list(range(period - 1, layers, period)),
        "deepstack_visual_indexes": [layer for layer, flag in enumerate(flags) if flag],
    }  # fmt: skip
    least, most = (256, 4096) if kind == "qwen3_vl" else (56, 3584)
    edges = {"shortest_edge": data.whole("vision.image_min_pixels", least**2),
             "longest_edge": data.whole("vision.image_max_pixels", most**2)}  # fmt: skip
    return {"vision_config": tower}, {"patch_size": patch, "merge_size": merge, "size": edges}, {}


class GgufVision(Vision):
    """The images of a GGUF model by its `mmproj` file."""

    def __init__(self, file: GgufFile, model: GgufModel, device: torch.device, dtype: torch.dtype) -> None:
        """Raises InvalidFile for a file that is not read, or of another model."""
        super().__init__(str(file.paths[0]), None, device, dtype)
        self.file, self._data, text = file, (data := Metadata(file)), model.config
        projector = str(file.metadata.get("clip.vision.projector_type") or file.metadata.get("clip.projector_type"))
        if projector not in PROJECTORS:
            raise data.refused(f"has the projector {projector[:80]!r}, which is not read")
        self._kind, tokens, names = PROJECTORS[projector]
        self._settings = _settings(self._kind, data, text["hidden_size"])
        levels = self._settings[0]["vision_config"].get("deepstack_visual_indexes", [])
        has_axes = "mrope_section" in (text.get("rope_parameters") or ())
        if len(levels) != text["deepstack_levels"] or has_axes != self._kind.startswith("qwen"):
            raise data.refused("is the vision tower of another kind of model")
        stack = {f".v.deepstack.{layer}.": f".v.deepstack_merger_list.{i}." for i, layer in enumerate(levels)}
        self._names = {**stack, **names}
        up = data.shape("v.blk.0.ffn_up.weight")
        if up[0] == data.whole("vision.embedding_length") != up[-1]:  # in older files
            self._names |= {".ffn_up": names[".ffn_down"], ".ffn_down": names[".ffn_up"]}
        backend: Any = None if model.tokenizer is None else model.tokenizer.backend
        known = [one for one in tokens.split() if backend is not None and backend.token_to_id(one) is not None]
        if not known:
            raise data.refused(f"is of a model that has the token {tokens}")
        self._tokenizer, self._image, number = backend.tokenizer, known[0], backend.token_to_id(known[0])
        sizes = "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim"
        self._settings[0].update(text_config={name: text[name] for name in sizes}, image_token_id=number)
        self._program = None  # the network's language model has no other settings

    @cached_property
    def _config(self) -> Any:
        from transformers import AutoConfig

        return AutoConfig.for_model(self._kind, **self._settings[0])

    @cached_property
    def _processor(self) -> Any:
        import transformers

        silence_libraries()
        images = {"gemma3": "Gemma3", "idefics3": "Idefics3"}.get(self._kind, "Qwen2VL")
        named = {"image_token": self._image}
        if self._kind == "gemma3":
            named |= {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>"}
        spread = {name: self._data.own_numbers(f"clip.vision.{name}", 3) for name in ("image_mean", "image_std")}
        given = {"tokenizer_object": self._tokenizer, "extra_special_tokens": named}
        return processor_class(self._kind)(
            image_processor=getattr(transformers, f"{images}ImageProcessor")(**self._settings[1], **spread),
            tokenizer=transformers.PreTrainedTokenizerFast(**given), **self._settings[2],
        )  # fmt: skip

    def _network(self, config: Any) -> tuple[Any, dict[str, Any]]:
        from transformers import AutoModelForImageTextToText

        found: dict[str, list[Tensor]] = {}
        for tensor in sorted(self.file.tensors, key=lambda name: (".attn_q." not in name, ".attn_v." in name, name)):
            numbers, name = self.file.tensors[tensor].numbers, f".{tensor}"
            for theirs, ours in self._names.items():
                name = name.replace(theirs, ours)
            numbers = numbers.float() - 1 if "soft_emb_norm" in name else numbers  # which has 1 added in files
            found.setdefault(name[1:], []).append(numbers.to(self._dtype))
        weights = {  # several are queries, keys and values, or for two images in time
            name: parts[0] if len(parts) == 1 else torch.cat(parts) if parts[0].ndim < 4 else torch.stack(parts, 2)
            for name, parts in found.items()
        }
        network, report = AutoModelForImageTextToText._model_mapping[type(config)].from_pretrained(
            None, config=config, state_dict=weights, dtype=self._dtype, ignore_mismatched_sizes=True,
            output_loading_info=True,
        )  # fmt: skip
        if wrong := sorted([*report["unexpected_keys"], *(name for name, *_ in report["mismatched_keys"])]):
            raise ModelError(f"{self._source} is not of this model: {wrong[0]} does not fit it.")
        return network, report


def vision_beside(
    paths: Sequence[Path], model: GgufModel, device: torch.device, dtype: torch.dtype
) -> GgufVision | str:
    """The images of a model by the first of some `mmproj` files, or why it takes none."""
    if not paths:
        return f"{NO_IMAGES}: no mmproj file lies beside its own"
    if len(paths) > 1:
        _log.warning("Of %d mmproj files for one model, %s is read.", len(paths), paths[0])
    try:
        return GgufVision(read_gguf(paths[:1]), model, device, dtype)
    except (InvalidFile, OSError) as error:
        return f"{NO_IMAGES}: {error}"
