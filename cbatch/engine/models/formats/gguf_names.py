"""What transformers calls the tensors of a GGUF file."""

from __future__ import annotations

import re
from collections.abc import Iterator

from cbatch.engine.base.model_files import InvalidFile
from cbatch.engine.models.formats.gguf_config import Config, architecture_of
from cbatch.engine.models.formats.gguf_file import GgufFile
from cbatch.engine.models.formats.gguf_weights import Source
from cbatch.engine.models.programs.builder import deinterleaved

_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "ffn_gate_inp": "mlp.gate",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate", "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj", "ffn_down_shexp": "mlp.shared_expert.down_proj",
}  # fmt: skip
_POST_NORMS = {
    "post_attention_norm": "post_attention_layernorm", "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_OTHERS = {
    "mixtral": {"ffn_gate_inp": "block_sparse_moe.gate"},
    "gemma2": _POST_NORMS,
    "gemma3_text": _POST_NORMS,
    "phi3": {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"},
    "gpt_oss": {"post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
    "lfm2": {
        "attn_norm": "operator_norm", "attn_output": "self_attn.out_proj", "attn_q_norm": "self_attn.q_layernorm",
        "attn_k_norm": "self_attn.k_layernorm", "ffn_norm": "ffn_norm", "ffn_gate": "feed_forward.w1",
        "ffn_up": "feed_forward.w3", "ffn_down": "feed_forward.w2", "shortconv.in_proj": "conv.in_proj",
        "shortconv.out_proj": "conv.out_proj", "shortconv.conv": "conv.conv",
    },
}  # fmt: skip
"""By `model_type`: what other models call otherwise, or do not have."""

_OTHER_MODEL = {"lfm2": {"token_embd_norm": "model.embedding_norm", "output_norm": "model.embedding_norm"}}

_EXPERTS = {
    "mixtral": "block_sparse_moe.experts.{}.{}", "qwen2_moe": "mlp.experts.{}.{}_proj",
    "qwen3_moe": "mlp.experts.{}.{}_proj",
}  # fmt: skip
_COUNTS = {"mixtral": "num_local_experts", "qwen2_moe": "num_experts", "qwen3_moe": "num_experts"}
_MIXTRAL = {"gate": "w1", "up": "w3", "down": "w2"}

_NOT_WEIGHTS = re.compile(r"rope_freqs\.weight|rope_factors_(long|short)\.weight")
"""Tensors that the config is made of."""

_LAYER_TENSOR = re.compile(r"blk\.(\d+)\.(.+)\.(weight|bias)")
_EXPERT_TENSOR = re.compile(r"ffn_(gate|up|down)_exps")


def sources_of(file: GgufFile, config: Config) -> dict[str, Source]:
    """The weights of a model, by the names that transformers has for them.

    Raises InvalidFile for a tensor that models of its architecture do not have.
    """
    found: dict[str, Source] = {}
    for name in file.tensors:
        if not _NOT_WEIGHTS.fullmatch(name):
            found.update(_sources(file, name, config))
    return found


def _sources(file: GgufFile, name: str, config: Config) -> Iterator[tuple[str, Source]]:
    kind, match = config["model_type"], _LAYER_TENSOR.fullmatch(name)
    offset = -architecture_of(file).norm_offset if name.endswith("_norm.weight") else 0.0
    if match is None:
        part, _, suffix = name.rpartition(".")
        names = _MODEL | _OTHER_MODEL.get(kind, {})
        if part not in names:
            raise InvalidFile(f"{file.paths[0]} holds the tensor {name[:80]!r}, which is not read.")
        yield f"{names[part]}.{suffix}", Source((name,), offset=offset)
        return
    number, part, suffix = match.groups()
    prefix = f"model.layers.{number}."
    if experts := _EXPERT_TENSOR.fullmatch(part):
        yield from _experts(file, name, prefix, experts[1], suffix, config)
        return
    if kind == "gpt_oss" and part == "attn_sinks":
        yield f"{prefix}self_attn.sinks", Source((name,))
        return
    names = _LAYER | _OTHERS.get(kind, {})
    if part not in names:
        raise InvalidFile(f"{file.paths[0]} holds the tensor {name[:80]!r}, which is not read.")
    shape, order = file.tensors[name].shape, None
    if part == "shortconv.conv" and len(shape) == 2:
        shape = (shape[0], 1, shape[1])
    if part == "ffn_gate_inp_shexp" and len(shape) == 1:
        shape = (1, *shape)
    if architecture_of(file).is_permuted and part in ("attn_q", "attn_k"):
        heads = config["num_attention_heads" if part == "attn_q" else "num_key_value_heads"]
        if shape[0] != heads * config["head_dim"] or config["head_dim"] % 2:
            raise InvalidFile(f"{file.paths[0]}: the tensor {name!r} does not have {heads} heads.")
        order = deinterleaved(heads, config["head_dim"], config["head_dim"])
    yield f"{prefix}{names[part]}.{suffix}", Source((name,), shape, order=order, offset=offset)


def _experts(
    file: GgufFile, name: str, prefix: str, part: str, suffix: str, config: Config
) -> Iterator[tuple[str, Source]]:
    """The matrices of all experts, which transformers has one by one, or for GPT-OSS with gate and up in turns."""
    kind, shape = config["model_type"], file.tensors[name].shape
    if kind == "gpt_oss":
        ending = "" if suffix == "weight" else "_bias"
        is_matrix = suffix == "weight"
        if part == "down":
            yield (
                f"{prefix}mlp.experts.down_proj{ending}",
                Source((name,), _turned(shape) if is_matrix else shape, is_transposed=is_matrix),
            )
        elif part == "gate":
            other = name.replace("ffn_gate_exps", "ffn_up_exps")
            if other not in file.tensors or file.tensors[other].shape != shape:
                raise InvalidFile(f"{file.paths[0]} has no tensor {other!r} of the shape {shape}.")
            both = (shape[0], 2 * shape[1], *shape[2:])
            yield (
                f"{prefix}mlp.experts.gate_up_proj{ending}",
                Source((name, other), _turned(both) if is_matrix else both, is_transposed=is_matrix),
            )
        return
    if kind not in _EXPERTS or suffix != "weight" or len(shape) != 3 or shape[0] != config.get(_COUNTS[kind]):
        raise InvalidFile(f"{file.paths[0]} holds the tensor {name[:80]!r}, which is not read.")
    for number in range(shape[0]):
        ours = _EXPERTS[kind].format(number, _MIXTRAL[part] if kind == "mixtral" else part)
        yield f"{prefix}{ours}.weight", Source((name,), expert=number)


def _turned(shape: tuple[int, ...]) -> tuple[int, ...]:
    return (*shape[:-2], *reversed(shape[-2:]))
