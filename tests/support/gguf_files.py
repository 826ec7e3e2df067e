"""GGUF files of tiny models, written by llama.cpp's own package, and networks with exactly their numbers.

Names come from the package's table, and rows and norms are changed as llama.cpp's converter changes them: nothing here
is shared with what reads the files. Matrices in formats that the package cannot write are made of random blocks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import gguf
import numpy as np
import torch
import transformers
from gguf import GGMLQuantizationType as Kind
from numpy.typing import NDArray
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.support.architectures import make_architecture
from tests.support.model_folder import TEMPLATE, make_tokenizer
from tests.support.programs import SavedModel, saved_model

ARCHITECTURES = {
    "llama": "LLAMA", "mixtral": "LLAMA", "qwen2": "QWEN2", "qwen2_moe": "QWEN2MOE", "qwen3": "QWEN3",
    "qwen3_moe": "QWEN3MOE", "gemma2": "GEMMA2", "gemma3_text": "GEMMA3", "phi3": "PHI3", "granite": "GRANITE",
    "gpt_oss": "GPT_OSS", "lfm2": "LFM2",
}  # fmt: skip
"""What the package calls the architecture of a `model_type`."""

_PERMUTED = ("llama", "mixtral", "granite")
_WRITTEN = (Kind.F32, Kind.F16, Kind.BF16, Kind.Q4_0, Kind.Q4_1, Kind.Q5_0, Kind.Q5_1, Kind.Q8_0)
_SCALES = {
    Kind.Q2_K: (80, 82), Kind.Q3_K: (108,), Kind.Q4_K: (0, 2), Kind.Q5_K: (0, 2), Kind.Q6_K: (208,), Kind.IQ4_NL: (0,),
    Kind.IQ4_XS: (0,), Kind.MXFP4: (),
}  # fmt: skip
"""Where a block has the float16 factors of its numbers."""

Array = NDArray[Any]


_OVERRIDES: dict[str, dict[str, Any]] = {
    "gemma2": {"tie_word_embeddings": True, "query_pre_attn_scalar": 16},
    "gemma3_text": {"tie_word_embeddings": True, "query_pre_attn_scalar": 16},
    "mixtral": {"sliding_window": None},
    "qwen2": {"use_sliding_window": False, "layer_types": None},
    "qwen2_moe": {"use_sliding_window": False, "layer_types": None, "mlp_only_layers": [], "norm_topk_prob": False},
    "qwen3": {"use_sliding_window": False, "layer_types": None},
    "qwen3_moe": {"use_sliding_window": False, "layer_types": None, "mlp_only_layers": [], "norm_topk_prob": True},
}
"""Settings that GGUF files cannot say otherwise."""


@dataclass(frozen=True)
class Piece:
    """A tensor of a GGUF file, the tensors that it is made of, and how these are made of it again."""

    name: str
    numbers: Array
    back: Callable[[Array], dict[str, Array]]


def gguf_model(kind: str, **sizes: Any) -> SavedModel:
    """A tiny model of a type, with settings that a GGUF file can have. sizes: keys of its config that are different"""
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
        add_value(writer, key, value)
    found: dict[str, Tensor] = {}
    for piece in pieces(saved):
        is_matrix = piece.numbers.ndim > 1 and not re.search("ffn_gate_inp|shortconv.conv|token_types", piece.name)
        is_matrix = is_matrix and not piece.name.endswith(".bias")
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
        return gguf.quants.quantize(numbers, kind)
    count, size = gguf.GGML_QUANT_SIZES[kind]
    generator = np.random.default_rng(len(piece.name))
    shape = (*numbers.shape[:-1], numbers.shape[-1] // count)
    blocks = generator.integers(0, 256, (*shape, size), dtype=np.uint8)
    if kind == Kind.MXFP4:
        blocks[..., 0] = generator.integers(120, 124, shape)
    for place in _SCALES[kind]:
        blocks[..., place : place + 2] = np.float16([0.01]).view(np.uint8)
    spread = gguf.quants.dequantize(blocks.reshape(*numbers.shape[:-1], -1), kind).std()
    factor = np.float16(0.01 * numbers.std() / spread)
    for place in _SCALES[kind]:
        blocks[..., place : place + 2] = np.array([factor]).view(np.uint8)
    return blocks.reshape(*numbers.shape[:-1], -1)


def pieces(saved: SavedModel) -> Iterator[Piece]:
    """The tensors of a model as llama.cpp's converter writes them."""
    config, tensors = saved.config, {name: tensor.float().numpy() for name, tensor in saved.tensors.items()}
    kind = config["model_type"]
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH[ARCHITECTURES[kind]], config["num_hidden_layers"])
    stacks: dict[str, dict[int, str]] = {}
    for name in tensors:
        if match := re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name):
            stacks.setdefault(f"{match[1]}.{match[3]}", {})[int(match[2])] = name
    for stack, members in stacks.items():
        own = [members[number] for number in range(len(members))]
        yield Piece(
            names.get_name(stack) + ".weight",
            np.stack([tensors[name] for name in own]),
            lambda array, own=own: dict(zip(own, array, strict=True)),
        )
    stacked = {name for members in stacks.values() for name in members.values()}
    for name, array in tensors.items():
        if name in stacked or (name == "lm_head.weight" and config.get("tie_word_embeddings")):
            continue
        if kind == "gpt_oss" and ".experts." in name:
            yield from _gpt_oss_experts(name, array)
            continue
        theirs = names.get_name(name, try_suffixes=(".weight", ".bias"))
        if name.endswith("sinks"):
            theirs = f"blk.{name.split('.')[2]}.attn_sinks.weight"
        assert theirs is not None, name
        if kind in _PERMUTED and re.search(r"[qk]_proj\.(weight|bias)", name):
            yield _permuted(theirs, name, array, config)
        elif kind.startswith("gemma") and name.endswith("norm.weight"):
            yield Piece(theirs, array + 1, lambda found, name=name: {name: found - 1})
        elif "conv.conv" in name:
            yield Piece(theirs, array[:, 0], lambda found, name=name: {name: found[:, None]})
        elif "shared_expert_gate" in name:
            yield Piece(theirs, array[0], lambda found, name=name: {name: found[None]})
        else:
            yield Piece(theirs, array, lambda found, name=name: {name: found})


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
        yield Piece(
            f"blk.{layer}.ffn_{part}_exps.{suffix}", turned[:, start::2], lambda found, start=start: back(found, start)
        )


def add_settings(writer: Any, saved: SavedModel) -> None:
    """The metadata that llama.cpp's converter writes."""
    config = saved.config
    kind, heads = config["model_type"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_head_count(heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config.get("rms_norm_eps", config.get("norm_eps")))
    if kind == "lfm2":
        writer.add_feed_forward_length(len(saved.tensors["model.layers.0.feed_forward.w1.weight"]))
    elif (size := config.get("intermediate_size")) is not None:
        writer.add_feed_forward_length(size)
    if kind == "lfm2":
        is_full = [one == "full_attention" for one in config["layer_types"]]
        writer.add_head_count_kv([config["num_key_value_heads"] * one for one in is_full])
        writer.add_shortconv_l_cache(config["conv_L_cache"])
    else:
        writer.add_head_count_kv(config["num_key_value_heads"])
    rope = config.get("rope_parameters") or {}
    if kind == "gemma3_text":
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
        rope = rope["full_attention"]
    writer.add_rope_freq_base(rope.get("rope_theta", 10000.0))
    if rope.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
    if config.get("sliding_window"):
        writer.add_sliding_window(config["sliding_window"])
    for key in ("num_experts", "num_local_experts"):
        if config.get(key):
            writer.add_expert_count(config[key])
            writer.add_expert_used_count(config["num_experts_per_tok"])
    if kind == "gemma2":
        writer.add_attn_logit_softcapping(config["attn_logit_softcapping"])
        writer.add_final_logit_softcapping(config["final_logit_softcapping"])
    if kind == "gemma3_text":
        writer.add_sliding_window_pattern([one == "sliding_attention" for one in config["layer_types"]])
    if kind == "granite":
        writer.add_attention_scale(config["attention_multiplier"])
        writer.add_embedding_scale(config["embedding_multiplier"])
        writer.add_residual_scale(config["residual_multiplier"])
        writer.add_logit_scale(config["logits_scaling"])


def add_value(writer: Any, key: str, value: Any) -> None:
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


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
