"""The published configurations in `tests/data/configs`: which path each takes, and small models of their kind."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping
from copy import deepcopy
from functools import cache
from pathlib import Path
from typing import Any

import torch
from transformers import CONFIG_MAPPING

from cbatch.attention.cpu import CpuAttention
from cbatch.base.errors import ModelError
from cbatch.model.config import UnsupportedConfig, check_model_config
from cbatch.model.config_classes import SAME_AS, wrapper_of
from cbatch.model.cpu import CpuModel
from cbatch.model.families import read_program
from cbatch.model.formats.quantized import QuantizedCheckpoint, settings_of, without_quantization
from cbatch.model.hf.adapter import TransformersModel
from cbatch.model.hf.facts import check_config
from cbatch.model.hf.memory_check import auto_class
from tests.support.architectures import draw, shrunk
from tests.support.programs import as_files, draw_buffers, error_of, logits_in_chunks
from tests.support.tiny_models import make_prompts
from tests.support.wrappers import layers_renamed, saved_wrapper, text_logits

FOLDER = Path(__file__).parents[1] / "data" / "configs"
EXPECTED = FOLDER / "expected" / "paths.json"
"""The path of each, as `python -m scripts.real_checkpoints --write` has written it."""

FAST, TRANSFORMERS, REFUSED = "fast", "transformers", "refused"
PROMPT = make_prompts([40], seed=8)[0]
"""It holds no token that stands for a picture."""


def names() -> list[str]:
    """AUTHOR/MODEL of every file."""
    return sorted(path.stem.replace("--", "/") for path in FOLDER.glob("*.json"))


def published(name: str) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((FOLDER / f"{name.replace('/', '--')}.json").read_text(encoding="utf-8"))
    return config


@cache
def path_of(name: str) -> str:
    """The path that a checkpoint takes, with the reason if it is not the fast one."""
    config = published(name)
    check_model_config(config, FOLDER / name)
    try:
        if settings_of(config) is not None:
            QuantizedCheckpoint(config)
        read_program(without_quantization(config))
    except UnsupportedConfig as error:
        kind = config.get("model_type")
        if kind not in CONFIG_MAPPING:
            return f"{REFUSED}: transformers has no model type {kind}"
        if "where transformers reads it" in str(error):  # a small one would be as large as its class has it
            return f"{TRANSFORMERS}: {error}"
        try:
            whole = _configuration(without_quantization(config))
            check_config(whole, whole.get_text_config())
            TransformersModel(_network(small_config(name)))
        except ModelError as refusal:
            return f"{REFUSED}: {str(refusal).rpartition(': ')[2].rstrip('.')}"
        return f"{TRANSFORMERS}: {error}"
    return FAST


def small_config(name: str) -> dict[str, Any]:
    """The published file with every size made small, and everything else as it is."""
    config = without_quantization(published(name))
    kind = str(config["model_type"])
    wrapper = wrapper_of(kind)
    if wrapper is None:
        return _cut(config)
    inner: Any = config
    for key in wrapper.part:
        inner = inner.get(key) if isinstance(inner, Mapping) else None
    tiny = saved_wrapper(kind).config
    outer = {key: value for key, value in config.items() if not isinstance(value, dict)}
    if not isinstance(inner, Mapping):  # the file has the settings of both models side by side
        flat = _cut({key: value for key, value in config.items() if not key.endswith("_config")})
        return {key: value for key, value in (tiny | flat).items() if key != wrapper.part[0]}
    small = tiny | {key: value for key, value in outer.items() if not key.endswith(("_token_id", "_token_index"))}
    place = small
    for key in wrapper.part[:-1]:
        place = place[key]
    place[wrapper.part[-1]] = _cut(dict(inner))
    return small


def _cut(config: dict[str, Any]) -> dict[str, Any]:
    """Smaller sizes, for lists that have a number for each frequency or layer, too."""
    small = shrunk(config, {}) | {key: value for key, value in config.items() if value is None}
    if "use_sliding_window" in config:
        small["use_sliding_window"] = config["use_sliding_window"]
    if set(config.get("layer_types") or ()) == {"full_attention"}:
        small["layer_types"] = ["full_attention"] * small["num_hidden_layers"]
    if config.get("moe_latent_size"):
        small["moe_latent_size"] = 32
    if isinstance(pattern := config.get("hybrid_override_pattern"), str):  # a letter for each layer
        small["hybrid_override_pattern"] = "".join(dict.fromkeys(pattern))
        small["num_hidden_layers"] = len(small["hybrid_override_pattern"])
    if swa := config.get("swa_num_key_value_heads"):
        small["swa_num_key_value_heads"] = small["num_key_value_heads"] * swa // config["num_key_value_heads"]
    for key in ("rope_scaling", "rope_parameters"):
        rope = small.get(key)
        if isinstance(rope, dict):
            width = small.get("qk_rope_head_dim") or small.get("head_dim") or 64 // small["num_attention_heads"]
            share = small.get("partial_rotary_factor") or rope.get("partial_rotary_factor") or 1.0
            half = int(width * share) // 2
            for factors in ("short_factor", "long_factor"):
                if factors in rope:
                    rope[factors] = rope[factors][:half]
            for section in ("mrope_section", "xdrope_section"):
                if section in rope:
                    rest = half // 4
                    rope[section] = [half - 2 * rest, rest, rest]
    return small


def _configuration(config: Mapping[str, Any]) -> Any:
    kind = SAME_AS.get(str(config["model_type"]), str(config["model_type"]))
    given = deepcopy({key: value for key, value in config.items() if key != "model_type"})  # which transformers changes
    return CONFIG_MAPPING[kind](**given)


def _network(config: dict[str, Any]) -> Any:
    """A random model of transformers' with a configuration."""
    made = _configuration(config)
    with torch.device("meta"):
        numbers = sum(parameter.numel() for parameter in auto_class(made).from_config(made).parameters())
    assert numbers < 10**8, "the small model is not small"
    torch.manual_seed(0)
    network = auto_class(made).from_config(made).float().eval()
    draw(network, 1.5)
    draw_buffers(network)
    return network


def same_small_models(chosen: Iterable[str]) -> list[list[str]]:
    """Groups of those that differ in nothing but sizes and keys without effect."""
    groups: dict[str, list[str]] = defaultdict(list)
    for name in chosen:
        config = {key: value for key, value in small_config(name).items() if key not in ("architectures", "auto_map")}
        groups[json.dumps(config, sort_keys=True)].append(name)
    return list(groups.values())


def error_in(name: str, renamed: str = "") -> float:
    """The largest difference between the fast path and transformers, as a share of the spread of the logits.

    Of a tiny random model with the published settings.
    renamed: a key that the fast path is not given under its name
    """
    config = small_config(name)
    network = _network(config)
    config = {f"its_{key}" if key == renamed else key: value for key, value in config.items()}
    _, tensors = as_files(network)
    model = CpuModel(config, layers_renamed(network.config.model_type, tensors), torch.float32)
    prompt = PROMPT[: min(model.max_model_len, model.short_context or 40)]
    found = logits_in_chunks(model, CpuAttention(), prompt, [0, 3, len(prompt)])
    return error_of(found, text_logits(network, prompt))
