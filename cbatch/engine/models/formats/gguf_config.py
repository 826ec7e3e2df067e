"""The settings of a model as its `config.json` would have them, from the metadata of a GGUF file.

Sizes that a file claims are compared with the shapes of its tensors first, because a program is made of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from cbatch.engine.base.errors import ModelError
from cbatch.engine.base.model_files import InvalidFile
from cbatch.engine.models.formats.gguf_blocks import values_of
from cbatch.engine.models.formats.gguf_file import GgufFile

_LARGEST = 2**31 - 1
_MAX_LAYERS, _MAX_EXPERTS = 1024, 4096

Config = dict[str, Any]


class Metadata:
    """The metadata of a file, with the type that each entry must have. Raises InvalidFile for another one."""

    def __init__(self, file: GgufFile) -> None:
        self.file = file
        self._prefix = file.architecture + "."

    def _get(self, name: str) -> Any:
        return self.file.metadata.get(self._prefix + name)

    def whole(self, name: str, default: int | None = None) -> int:
        """A whole number; if layers have one each, that of all."""
        value = self._get(name)
        if isinstance(value, list) and value and len(set(value)) == 1:
            value = value[0]
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _LARGEST:
            raise self._wrong(name, value)
        return value

    def number(self, name: str, default: float | None = None) -> float:
        value = self._get(name)
        if value is None and default is not None:
            return default
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self._wrong(name, value)
        return float(value)

    def text(self, name: str, default: str) -> str:
        value = self._get(name)
        if value is None:
            return default
        if not isinstance(value, str):
            raise self._wrong(name, value)
        return value

    def wholes(self, name: str, count: int) -> list[int]:
        """A number for each layer."""
        value = self._get(name)
        values = [value] * count if isinstance(value, int) else value
        if not isinstance(values, list) or len(values) != count or not all(type(one) is int for one in values):
            raise self._wrong(name, value)
        return values

    def has(self, name: str) -> bool:
        return self._get(name) is not None

    def _wrong(self, name: str, value: Any) -> InvalidFile:
        found = "lacks" if value is None else f"has {str(value)[:60]!r} as"
        return InvalidFile(f"{self.file.paths[0]} {found} {self._prefix}{name}.")

    def shape(self, tensor: str) -> tuple[int, ...]:
        """Of a tensor that must be there."""
        if tensor not in self.file.tensors:
            raise InvalidFile(f"{self.file.paths[0]} has no tensor {tensor!r}.")
        return self.file.tensors[tensor].shape

    def factors(self, tensor: str, count: int) -> list[float] | None:
        """Numbers of a small tensor that changes frequencies; None if it is not there."""
        if tensor not in self.file.tensors:
            return None
        found = self.file.tensors[tensor]
        if found.shape != (count,):
            raise InvalidFile(f"{self.file.paths[0]}: the tensor {tensor!r} has the shape {found.shape}.")
        values = [float(value) for value in values_of(found.type, found.data)[0].tolist()]
        if not all(math.isfinite(value) and value > 0 for value in values):
            raise InvalidFile(f"{self.file.paths[0]} is damaged: {tensor!r} has numbers that cannot be factors.")
        return values


@dataclass(frozen=True, slots=True)
class Architecture:
    """How models of an architecture are described.

    kind, name: their `model_type` and their class in transformers
    config:     what they have beside the common settings
    is_permuted: rows of queries and keys lie so that neighbours are rotated together
    norm_offset: what the file adds to weights of norms
    """

    kind: str
    name: str
    config: Callable[[Metadata, Config], Config]
    is_permuted: bool = False
    norm_offset: float = 0.0


def architecture_of(file: GgufFile) -> Architecture:
    """Raises ModelError for an architecture that has no fast path here."""
    found = ARCHITECTURES.get(file.architecture)
    if found is None:
        known = ", ".join(sorted(ARCHITECTURES))
        raise ModelError(
            f"GGUF models of the architecture {file.architecture[:80]!r} are not read, but those of {known} are."
        )
    if file.architecture == "llama" and _has_experts(file):
        return replace(found, kind="mixtral", name="MixtralForCausalLM")
    return found


def _has_experts(file: GgufFile) -> bool:
    return "blk.0.ffn_gate_exps.weight" in file.tensors


def read_config(file: GgufFile) -> Config:
    """The config of a file's model. Raises ModelError if it is not known, or does not fit the tensors."""
    architecture, data = architecture_of(file), Metadata(file)
    vocabulary, hidden = _two(data.shape("token_embd.weight"), file)
    layers = data.whole("block_count")
    numbers = {name.split(".")[1] for name in file.tensors if name.startswith("blk.")}
    if numbers != {str(number) for number in range(len(numbers))} or len(numbers) != layers or layers > _MAX_LAYERS:
        raise InvalidFile(f"{file.paths[0]} claims to have {layers} layers, and has tensors of {len(numbers)}.")
    if data.whole("embedding_length") != hidden:
        raise InvalidFile(f"{file.paths[0]} claims to have an embedding of another width than its tensors have.")
    heads = data.whole("attention.head_count")
    head_dim = data.whole("attention.key_length", hidden // heads if heads else 0)
    config: Config = {
        "model_type": architecture.kind,
        "architectures": [architecture.name],
        "vocab_size": vocabulary,
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "head_dim": head_dim,
        "max_position_embeddings": data.whole("context_length"),
        "rms_norm_eps": data.number("attention.layer_norm_rms_epsilon"),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "eos_token_id": None,
    }
    if file.architecture != "lfm2":
        config["num_key_value_heads"] = data.whole("attention.head_count_kv", heads)
    if data.has("feed_forward_length"):
        config["intermediate_size"] = data.whole("feed_forward_length")
    _check_heads(data, config)
    config |= architecture.config(data, config)
    return config


def _two(shape: tuple[int, ...], file: GgufFile) -> tuple[int, int]:
    if len(shape) != 2:
        raise InvalidFile(f"{file.paths[0]} is damaged: its embedding has the shape {shape}.")
    return shape[0], shape[1]


def _check_heads(data: Metadata, config: Config) -> None:
    """Heads must be those of some layer's queries, so that nothing is made for more of them."""
    heads, head_dim = config["num_attention_heads"], config["head_dim"]
    names = [name for name in data.file.tensors if name.startswith("blk.") and name.endswith(".attn_output.weight")]
    if not names or heads < 1 or data.shape(names[0])[-1] != heads * head_dim:
        raise InvalidFile(f"{data.file.paths[0]} claims to have {heads} heads of {head_dim}, and its tensors differ.")
    if data.whole("attention.value_length", head_dim) != head_dim:
        raise InvalidFile(f"{data.file.paths[0]} has values of another size than keys, which is not read.")


def _check_experts(data: Metadata) -> tuple[int, int]:
    """How many experts there are, and how many a token has."""
    experts, top_k = data.whole("expert_count"), data.whole("expert_used_count")
    shape = data.shape("blk.0.ffn_gate_exps.weight")
    if len(shape) != 3 or shape[0] != experts or not 1 <= top_k <= experts <= _MAX_EXPERTS:
        raise InvalidFile(f"{data.file.paths[0]} claims to have {experts} experts, and its tensors differ.")
    return experts, top_k


def _rope(data: Metadata, config: Config, default_base: float = 10000.0) -> Config:
    """The settings of rotary positions."""
    head_dim, base = config["head_dim"], data.number("rope.freq_base", default_base)
    rotated = data.whole("rope.dimension_count", head_dim)
    if rotated > head_dim:
        raise InvalidFile(f"{data.file.paths[0]} claims to rotate {rotated} numbers of a head of {head_dim}.")
    rope: Config = {"rope_type": "default", "rope_theta": base}
    if rotated != head_dim:
        rope["partial_rotary_factor"] = rotated / head_dim
    if base <= 0:
        raise InvalidFile(f"{data.file.paths[0]} has {base} as rope.freq_base.")
    factors = data.factors("rope_freqs.weight", rotated // 2)
    scaling = data.text("rope.scaling.type", "none")
    factor = data.number("rope.scaling.factor", 1.0)
    if factors is not None:
        rope |= {"rope_type": "factors", "factors": factors}
    elif scaling == "linear" and factor != 1:
        rope |= {"rope_type": "linear", "factor": factor}
    elif scaling == "yarn":
        original = data.whole("rope.scaling.original_context_length")
        rope |= {"rope_type": "yarn", "factor": factor, "original_max_position_embeddings": original}
        for theirs, ours in (("yarn_beta_fast", "beta_fast"), ("yarn_beta_slow", "beta_slow")):
            if data.has(f"rope.scaling.{theirs}"):
                rope[ours] = data.number(f"rope.scaling.{theirs}")
    elif scaling not in ("none", "linear", "longrope"):
        raise InvalidFile(f"{data.file.paths[0]} scales rotary positions as {scaling[:40]!r}, which is not read.")
    return rope


def _llama(data: Metadata, config: Config) -> Config:
    tensors = data.file.tensors
    settings: Config = {"rope_parameters": _rope(data, config), "hidden_act": "silu"}
    if _has_experts(data.file):
        experts, top_k = _check_experts(data)
        return settings | {"num_local_experts": experts, "num_experts_per_tok": top_k}
    return settings | {
        "attention_bias": "blk.0.attn_q.bias" in tensors,
        "mlp_bias": "blk.0.ffn_down.bias" in tensors,
    }


def _qwen(data: Metadata, config: Config) -> Config:
    return {"rope_parameters": _rope(data, config), "hidden_act": "silu"}


def _qwen_moe(data: Metadata, config: Config) -> Config:
    """llama.cpp divides by the sum of a token's weights for Qwen 3, and does not for Qwen 2."""
    experts, top_k = _check_experts(data)
    settings = _qwen(data, config) | {"num_experts": experts, "num_experts_per_tok": top_k}
    settings["moe_intermediate_size"] = data.shape("blk.0.ffn_gate_exps.weight")[1]
    settings |= {"norm_topk_prob": config["model_type"] == "qwen3_moe", "decoder_sparse_step": 1, "mlp_only_layers": []}
    if config["model_type"] == "qwen2_moe":
        settings["shared_expert_intermediate_size"] = data.shape("blk.0.ffn_gate_shexp.weight")[0]
    return settings


def _gemma2(data: Metadata, config: Config) -> Config:
    """The largest of them scales scores by the width of the model, which its file does not say."""
    is_largest = config["num_hidden_layers"] == 46
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    return {
        "rope_parameters": _rope(data, config),
        "sliding_window": data.whole("attention.sliding_window", 4096),
        "attn_logit_softcapping": data.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": data.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": hidden / heads if is_largest else config["head_dim"],
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _gemma3(data: Metadata, config: Config) -> Config:
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    full = _rope(data, config, 1e6)
    local = {"rope_type": "default", "rope_theta": data.number("rope.freq_base_swa", 10000.0)}
    layers = config["num_hidden_layers"]
    kinds = ["sliding_attention" if (number + 1) % 6 else "full_attention" for number in range(layers)]
    if isinstance(data.file.metadata.get("gemma3.attention.sliding_window_pattern"), list):
        pattern = data.file.metadata["gemma3.attention.sliding_window_pattern"]
        kinds = ["sliding_attention" if one else "full_attention" for one in pattern[:layers]]
    return {
        "rope_parameters": {"full_attention": full, "sliding_attention": local},
        "sliding_window": data.whole("attention.sliding_window"),
        "layer_types": kinds,
        "query_pre_attn_scalar": hidden / heads if layers == 62 else config["head_dim"],
        "hidden_activation": "gelu_pytorch_tanh",
    }


def _phi3(data: Metadata, config: Config) -> Config:
    rope = _rope(data, config)
    rotated = data.whole("rope.dimension_count", config["head_dim"])
    short, long = (data.factors(f"rope_factors_{name}.weight", rotated // 2) for name in ("short", "long"))
    if short is not None and long is not None:
        rope |= {"rope_type": "longrope", "short_factor": short, "long_factor": long}
        rope["original_max_position_embeddings"] = data.whole("rope.scaling.original_context_length")
        if data.has("rope.scaling.attn_factor"):
            rope["attention_factor"] = data.number("rope.scaling.attn_factor")
    window = data.whole("attention.sliding_window", 0)
    return {"rope_parameters": rope, "sliding_window": window or None, "hidden_act": "silu"}


def _granite(data: Metadata, config: Config) -> Config:
    return _llama(data, config) | {
        "embedding_multiplier": data.number("embedding_scale", 1.0),
        "residual_multiplier": data.number("residual_scale", 1.0),
        "attention_multiplier": data.number("attention.scale", config["head_dim"] ** -0.5),
        "logits_scaling": data.number("logit_scale", 1.0) or 1.0,
    }


def _gpt_oss(data: Metadata, config: Config) -> Config:
    experts, top_k = _check_experts(data)
    rope = _rope(data, config, 150000.0)
    if rope["rope_type"] == "yarn":
        rope |= {"beta_fast": 32.0, "beta_slow": 1.0} | rope | {"truncate": False}
    return {
        "rope_parameters": rope,
        "num_local_experts": experts,
        "num_experts_per_tok": top_k,
        "intermediate_size": data.shape("blk.0.ffn_gate_exps.weight")[1],
        "sliding_window": data.whole("attention.sliding_window"),
        "attention_bias": True,
    }


def _lfm2(data: Metadata, config: Config) -> Config:
    """Layers without keys are convolutions."""
    kv_heads = data.wholes("attention.head_count_kv", config["num_hidden_layers"])
    del config["rms_norm_eps"]
    return {
        "rope_parameters": _rope(data, config, 1e6),
        "num_key_value_heads": max(kv_heads),
        "layer_types": ["full_attention" if heads else "conv" for heads in kv_heads],
        "norm_eps": data.number("attention.layer_norm_rms_epsilon"),
        "conv_L_cache": data.whole("shortconv.l_cache"),
        "conv_bias": any(name.endswith("shortconv.in_proj.bias") for name in data.file.tensors),
        "block_auto_adjust_ff_dim": False,
    }


ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", _llama, is_permuted=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM", _qwen),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM", _qwen_moe),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM", _qwen),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM", _qwen_moe),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", _gemma2, norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", _gemma3, norm_offset=1.0),
    "phi3": Architecture("phi3", "Phi3ForCausalLM", _phi3),
    "granite": Architecture("granite", "GraniteForCausalLM", _granite, is_permuted=True),
    "gpt-oss": Architecture("gpt_oss", "GptOssForCausalLM", _gpt_oss),
    "lfm2": Architecture("lfm2", "Lfm2ForCausalLM", _lfm2),
}
"""By `general.architecture`."""
