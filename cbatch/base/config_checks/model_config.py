"""Checks a config.json before anything is made of it: the types and ranges of what models have in common.

A size that no model comes near costs minutes or gigabytes before its weights are compared with it, and a wrong type
fails anywhere. What only some families have is left to them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cbatch.base.config_checks.kinds import (
    Either,
    Flag,
    Kind,
    Number,
    Numbers,
    Object,
    Text,
    Texts,
    Whole,
    check_settings,
    shown,
)
from cbatch.base.model_files import InvalidFile, read_json_object

_LAYERS, _HEADS, _EXPERTS, _COLUMNS, _VOCABULARY = 2**10, 2**14, 2**15, 2**20, 2**24
_TOKENS, _WINDOW = 2**31 - 1, 2**20
_TOKEN_IDS = Whole(-(2**31), 2**31 - 1, is_listed=True)
_POSITIONS = Number(1, _TOKENS)
"""Some files have them as 4096.0."""
_NAME, _FLAG, _OBJECT = Text(), Flag(), Object()
_EPSILON, _BASE = Number(0, 1), Number(1e-3, 1e15)


def _named(kind: Kind, names: str) -> dict[str, Kind]:
    return dict.fromkeys(names.split(), kind)


FIELDS: dict[str, Kind] = {
    **_named(Whole(1, _LAYERS), "num_hidden_layers n_layer n_layers num_layers"),
    **_named(Whole(1, _COLUMNS), "hidden_size n_embd d_model"),
    **_named(Whole(1, _VOCABULARY), "vocab_size"),
    **_named(Whole(1, _HEADS, is_listed=True), "num_attention_heads n_head n_heads num_heads"),
    **_named(Whole(1, _HEADS, is_listed=True), "num_key_value_heads num_kv_heads multi_query_group_num"),
    **_named(Whole(0, 2**16), "head_dim kv_channels qk_nope_head_dim qk_rope_head_dim v_head_dim global_head_dim"),
    **_named(
        Whole(0, _VOCABULARY, is_listed=True),
        "intermediate_size moe_intermediate_size shared_expert_intermediate_size n_inner ffn_dim d_ff ffn_hidden_size",
    ),
    **_named(
        Whole(0, _EXPERTS, is_listed=True),
        "num_experts num_local_experts n_routed_experts moe_num_experts n_shared_experts num_experts_per_tok "
        "num_experts_per_token moe_top_k moe_topk moe_k",
    ),
    **_named(_POSITIONS, "max_position_embeddings n_positions original_max_position_embeddings"),
    **_named(
        Whole(0, _WINDOW, is_listed=True), "sliding_window sliding_window_size attention_chunk_size attention_window"
    ),
    **_named(_BASE, "rope_theta rotary_emb_base rope_local_base_freq global_rope_theta local_rope_theta"),
    **_named(Number(0, 16), "partial_rotary_factor rotary_pct rope_pct"),
    **_named(
        _EPSILON, "rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon layernorm_epsilon rms_eps"
    ),
    **_named(Texts(_LAYERS), "layer_types layers_block_type mlp_layer_types block_types"),
    **_named(Texts(64), "architectures"),
    **_named(_NAME, "model_type hidden_act hidden_activation activation_function tokenizer_class"),
    **_named(Either(_NAME, _OBJECT), "dtype torch_dtype"),
    **_named(_TOKEN_IDS, "bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id decoder_start_token_id"),
    **_named(_FLAG, "tie_word_embeddings is_encoder_decoder is_decoder use_sliding_window"),
    **_named(_OBJECT, "rope_scaling rope_parameters quantization_config text_config vision_config audio_config"),
    **_named(_OBJECT, "id2label label2id auto_map"),
    **_named(Whole(0, 2**17), "num_labels"),
}
"""Settings of a text model, under all their names, and what they may be. The most is far beyond any model there is."""

_ROPE: dict[str, Kind] = {
    **_named(_NAME, "rope_type type"),
    **_named(_BASE, "rope_theta"),
    **_named(_POSITIONS, "original_max_position_embeddings"),
    **_named(Number(0, 16), "partial_rotary_factor"),
    **_named(Number(1e-6, 1e9), "factor low_freq_factor high_freq_factor beta_fast beta_slow"),
    **_named(Number(-1e9, 1e9), "attention_factor mscale mscale_all_dim"),
    **_named(Numbers(2**14), "long_factor short_factor mrope_section"),
}

_TEXT_PARTS = frozenset(("text_config", "llm_config", "language_config", "thinker_config", "decoder_config"))
"""Objects within a config.json that hold the settings of a text model."""

_COUNTS = {
    re.compile(r".*(layers|blocks|depth|passes|loops|cycles|codebooks)"): _LAYERS,
    re.compile(r".*(heads|experts|groups)"): _EXPERTS,
}
"""Names of settings, in parts of models too, after whose numbers modules are made one by one."""

_UNBOUNDED = frozenset(("model_max_length", "max_length"))
"""Settings of tokenizers that some files have as 10**30."""

_LONG = frozenset(("id2label", "label2id", "quantization_config"))
_MOST_SETTINGS = 20_000
"""Real files have some hundreds. transformers copies them several times, and looks at each."""


def read_model_config(folder: Path) -> dict[str, Any]:
    """The config.json of a folder; empty if there is none. Raises InvalidFile if it is damaged or cannot be true."""
    path = folder / "config.json"
    config = read_json_object(path)
    check_model_config(config, path)
    return config


def check_model_config(config: Mapping[str, Any], path: Path) -> None:
    """Raises InvalidFile for a setting of another type than all models have it, or of an impossible size."""
    _check_part(config, path, "")
    for count, (name, value) in enumerate(_settings(config)):
        if count >= _MOST_SETTINGS:
            raise InvalidFile(f"{path} has more than {_MOST_SETTINGS} settings.")
        if isinstance(value, int) and abs(value) >= 2**63 and name not in _UNBOUNDED:
            raise InvalidFile(f"{path}: {shown(name)} is {shown(value)}, which no setting of a model is.")


def _check_part(part: Mapping[str, Any], path: Path, inside: str, *, is_text: bool = True) -> None:
    if is_text:
        check_settings(part, FIELDS, path, inside)
    for name, value in part.items():
        if name in ("rope_scaling", "rope_parameters") and isinstance(value, dict):
            _check_rope(value, path, f"{inside}{name}.")
        elif isinstance(value, dict) and name.endswith("_config") and name != "quantization_config":
            _check_part(value, path, f"{inside}{name}.", is_text=name in _TEXT_PARTS)
        elif isinstance(value, int) and value > _LAYERS:
            _check_count(name, value, path, inside)


def _check_count(name: str, value: int, path: Path, inside: str) -> None:
    most = next((most for names, most in _COUNTS.items() if names.fullmatch(name)), value)
    if value > most:
        raise InvalidFile(f"{path}: {inside}{name} must be at most {most}, not {shown(value)}.")


def _check_rope(settings: Mapping[str, Any], path: Path, inside: str) -> None:
    check_settings(settings, _ROPE, path, inside)
    for kind, value in settings.items():  # by the types of layers
        if isinstance(value, dict):
            check_settings(value, _ROPE, path, f"{inside}{kind}.")


def _settings(config: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """All settings that are neither lists nor objects, each with the name of the innermost one that holds it.

    Without those of which a large model has many: labels, and how each of its matrices is quantized.
    """
    left: list[tuple[str, Any]] = [("", config)]
    while left:
        name, value = left.pop()
        if isinstance(value, dict):
            left += (item for item in value.items() if item[0] not in _LONG)
        elif isinstance(value, list):
            left += ((name, one) for one in value)
            yield name, None
        else:
            yield name, value
