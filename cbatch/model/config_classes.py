"""Defaults and names of keys in transformers' configuration classes, and which of them its models read.

The table is made from transformers' source by `python -m scripts.config_classes`, so nothing here imports it. A key
that nothing reads cannot change a result; published files are full of those.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

PATH = Path(__file__).with_suffix(".json")

SAME_AS = {"kimi_k2": "deepseek_v3", "mimo": "qwen2", "exaone4_5_text": "exaone4"}
"""Types of published files whose own code computes what a type of transformers does."""

LAYER_TYPES = {"mamba": "linear_attention", "attention": "full_attention",
               "deepseek_sparse_attention": "indexed_attention"}  # fmt: skip
"""Older names of types of layers."""

_OF_ALL = (
    "architectures", "eos_token_id", "dtype", "torch_dtype", "quantization_config", "image_token_id",
    "image_token_index", "video_token_id", "audio_token_id",
)  # fmt: skip
"""Keys of the outer level of a wrapper's file that also concern its language model."""


class UnsupportedConfig(Exception):
    """Why the fast path does not support a model."""


class ConfigClass(NamedTuple):
    """The configuration class of a type.

    defaults: what it has for keys that a file leaves out
    read:     keys that change a result
    names:    its own names of keys that files may call otherwise
    ends:     the tokens that end an output, if nothing else says which
    """

    defaults: Mapping[str, Any]
    read: frozenset[str]
    names: Mapping[str, str]
    ends: Any = None

    def changed(self, values: Mapping[str, Any]) -> list[str]:
        """Keys that change a result and have another value than the default; null, false and nothing are the same."""
        pairs = {key: (values[key], self.defaults.get(key)) for key in sorted(self.read & values.keys())}
        return [key for key, (value, default) in pairs.items() if value != default and (value or default)]


class Wrapper(NamedTuple):
    """Where the models of a type have the settings of their language model.

    part:     keys that lead to them
    text:     their type, if they do not say one
    fixed:    that is their type whatever they say
    flat:     files without such a part have them beside the others
    tied:     whether head and embedding are one tensor, if no level says so
    settings: of files that do not have them anywhere
    """

    part: tuple[str, ...]
    text: str
    fixed: bool = False
    flat: bool = False
    tied: bool = False
    settings: Mapping[str, Any] = {}


@cache
def _table() -> dict[str, Any]:
    found: dict[str, Any] = json.loads(PATH.read_text(encoding="utf-8"))
    return found


@cache
def class_of(kind: str) -> ConfigClass | None:
    """The class of a `model_type`; None if it is not in the table."""
    entry = _table()["classes"].get(SAME_AS.get(kind, kind))
    if entry is None:
        return None
    shared: dict[str, Any] = _table()["shared"]
    defaults = {**{key: one for key, one in shared.items() if one is not None}, **entry.get("defaults", {})}
    read = frozenset([*shared, *entry.get("read", ()), *defaults])
    return ConfigClass(defaults, read, entry.get("names", {}), entry.get("ends"))


@cache
def wrapper_of(kind: str) -> Wrapper | None:
    """Of a `model_type` whose models wrap a language model."""
    entry = _table()["wrappers"].get(kind)
    return None if entry is None else Wrapper(**{**entry, "part": tuple(entry["part"])})


def levels(config: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """The settings of a file, and those of the models in it that concern its language model."""
    yield config
    for key in ("thinker_config", "text_config"):
        if isinstance(inner := config.get(key), Mapping):
            yield from levels(inner)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The settings of the language model, under its own `model_type`; `wrapped_by` is that of a model around it.

    Raises UnsupportedConfig for settings that lie where transformers does not read them, and that matter.
    """
    kind = str(config.get("model_type"))
    wrapper = wrapper_of(kind)
    if wrapper is None:
        return config
    text: Any = config
    for key in wrapper.part:
        text = text.get(key) if isinstance(text, Mapping) else None
    if not isinstance(text, Mapping):
        text = config if wrapper.flat else wrapper.settings
        _check_unread(config, text, wrapper)
    given = None if text is config else text.get("model_type")
    kind = wrapper.text if wrapper.fixed or given is None else str(given)
    is_tied = config.get("tie_word_embeddings", wrapper.tied) or text.get("tie_word_embeddings", False)
    outer = {key: config[key] for key in _OF_ALL if key in config}
    towers = [one for level in levels(config) if isinstance(one := level.get("vision_config"), Mapping)]
    if count := sum(len(one.get("deepstack_visual_indexes") or ()) for one in towers):
        outer["deepstack_levels"] = count
    own = {"model_type": kind, "tie_word_embeddings": is_tied, "wrapped_by": config["model_type"]}
    return {**text, **outer, **own}


def _check_unread(config: Mapping[str, Any], text: Mapping[str, Any], wrapper: Wrapper) -> None:
    """text: the settings instead of those that the file does not have in their place"""
    known = class_of(wrapper.text)
    if text is config or known is None:
        return
    changed = known._replace(defaults={**known.defaults, **text}).changed(config)
    for key in changed:
        if key != "tie_word_embeddings":  # which counts at either level
            place = ".".join(wrapper.part)
            raise UnsupportedConfig(f"its {key} does not stand in {place}, where transformers reads it")
