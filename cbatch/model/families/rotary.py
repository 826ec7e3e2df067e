"""Rotary frequencies, as a config.json describes them."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from cbatch.model.config import ConfigReader, UnsupportedConfig
from cbatch.model.ops.all import Rotary


def read_rotary(
    config: ConfigReader, head_dim: int, *, layer_type: str | None = None, theta_key: str = "rope_theta",
    part: float | None = None, base: float | None = None, settings: Mapping[str, Any] | None = None,
    aliases: Mapping[str, str] | None = None,
) -> Rotary:  # fmt: skip
    """The rotary settings of a model, or of its layers of one type.

    theta_key: of older files
    part:      of a head that is rotated, if neither the file nor the class says it; without any of these, the family
               rotates whole heads, unless frequencies are scaled
    base:      instead of what the file says
    settings:  instead of all that the file says
    aliases:   what the family understands by names of kinds
    Raises UnsupportedConfig for kinds that are not known.
    """
    rope = rope_settings(config, layer_type, theta_key, part)
    has_part = (part or config.default("partial_rotary_factor")) is not None
    if settings is not None:
        rope = {"partial_rotary_factor": 1.0, **settings}
    if base is not None:
        rope["rope_theta"] = base
    kind = rope.get("rope_type", rope.get("type", "default"))
    kind = (aliases or {}).get(kind, kind)
    share = float(rope["partial_rotary_factor"])
    if not has_part and kind == "default" and share != 1:  # which transformers ignores, at least in some versions
        raise UnsupportedConfig("its rotary embedding covers only a part of each head")
    if kind == "proportional":
        return _proportional(head_dim, share, rope)
    width = int(head_dim * share)
    # torch rounds these as transformers does.
    frequencies = 1.0 / rope["rope_theta"] ** (torch.arange(0, width, 2, dtype=torch.int64).float() / width)
    factor = 1.0
    match kind:
        case "longrope":
            return _longrope(config, frequencies, rope)
        case "linear":
            frequencies = frequencies / float(rope["factor"])
        case "factors":  # a divisor for each frequency, as GGUF files have them
            frequencies = frequencies / torch.tensor(rope["factors"], dtype=torch.float32)
        case "llama3":
            frequencies = _llama3(frequencies, rope)
        case "yarn":
            frequencies, factor = _yarn(config, len(frequencies), rope)
        case "default" | "mrope":  # positions of pictures, which are plain ones for text
            pass
        case "dynamic":  # which changes beyond `max_position_embeddings`, where a model's context ends here
            pass
        case _:
            raise UnsupportedConfig(f"its rotary embedding has the type {kind}")
    return Rotary(tuple(frequencies.tolist()), factor, axes=_axes(config, rope.get("mrope_section"), width // 2))


def _axes(config: ConfigReader, sections: Any, count: int) -> tuple[int, ...]:
    """The axis of each of `count` frequencies (see `Rotary`): so many of each, side by side or in turns."""
    if not sections or sum(sections) != count:
        return ()
    if not str(config.get("model_type")).startswith("qwen3"):
        return tuple(axis for axis, size in enumerate(sections) for _ in range(size))
    axes = [0] * count
    for axis in (1, 2):
        axes[axis : 3 * sections[axis] : 3] = [axis] * len(axes[axis : 3 * sections[axis] : 3])
    return tuple(axes)


def rope_settings(
    config: ConfigReader, layer_type: str | None = None, theta_key: str = "rope_theta", part: float | None = None
) -> dict[str, Any]:
    """The settings in one dictionary; older files have other names for them."""
    newer, older = config.get("rope_parameters"), config.get("rope_scaling")
    given: dict[str, Any] = dict(older or newer or {})
    if layer_type is not None and layer_type in given:
        given = dict(given[layer_type] or {})
    given.setdefault("rope_theta", config.get(theta_key) or config["rope_theta"])
    given.setdefault("partial_rotary_factor", config.get("partial_rotary_factor") or part or 1.0)
    original = config.get("original_max_position_embeddings")
    if original is not None:
        given["original_max_position_embeddings"] = original
    return given


def _proportional(head_dim: int, share: float, rope: Mapping[str, Any]) -> Rotary:
    """The last frequencies are 0, so that a rotation of the whole head leaves a part as it is (Gemma 4)."""
    count = int(share * head_dim // 2)
    rotated = 1.0 / rope["rope_theta"] ** (torch.arange(0, 2 * count, 2, dtype=torch.int64).float() / head_dim)
    rotated = rotated / float(rope.get("factor") or 1.0)
    return Rotary((*rotated.tolist(), *[0.0] * (head_dim // 2 - count)))


def _llama3(frequencies: Tensor, rope: Mapping[str, Any]) -> Tensor:
    """Scales low frequencies, keeps high ones, and blends those between, as in Llama 3.1."""
    factor, low, high = float(rope["factor"]), float(rope["low_freq_factor"]), float(rope["high_freq_factor"])
    context = float(rope["original_max_position_embeddings"])
    lengths = 2 * math.pi / frequencies
    kept = (context / lengths - low) / (high - low)
    blended = (1 - kept) * frequencies / factor + kept * frequencies
    stretched = torch.where(lengths > context / low, frequencies / factor, blended)
    return torch.where(lengths < context / high, frequencies, stretched)


def _yarn(config: ConfigReader, count: int, rope: Mapping[str, Any]) -> tuple[Tensor, float]:
    """Interpolates low frequencies and keeps high ones (YaRN, Peng et al., 2023)."""
    context = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    factor = float(rope["factor"] or config["max_position_embeddings"] / context)
    width, theta = 2 * count, rope["rope_theta"]

    def dimension(rotations: float) -> float:
        return width * math.log(context / (rotations * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(rope.get("beta_fast") or 32), dimension(rope.get("beta_slow") or 1)
    if rope.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, width - 1)
    ramp = ((torch.arange(width // 2).float() - low) / ((high - low) or 0.001)).clamp(0, 1)
    kept = 1 - ramp
    powers = theta ** (torch.arange(0, width, 2).float() / width)
    inv_freq = 1.0 / (factor * powers) * (1 - kept) + 1.0 / powers * kept
    return inv_freq, yarn_attention_factor(rope, factor)


def yarn_attention_factor(rope: Mapping[str, Any], factor: float) -> float:
    given, scale, scale_all = (rope.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return float(given)
    if scale and scale_all:
        return yarn_mscale(factor, scale) / yarn_mscale(factor, scale_all)
    return yarn_mscale(factor)


def yarn_mscale(factor: float, scale: float = 1.0) -> float:
    return 0.1 * scale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _longrope(config: ConfigReader, frequencies: Tensor, rope: Mapping[str, Any]) -> Rotary:
    """A factor for each frequency (LongRoPE, Ding et al., 2024), others for texts beyond the first context."""
    context = rope.get("original_max_position_embeddings") or config["max_position_embeddings"]
    attention = rope.get("attention_factor")
    if attention is None:
        scale = float(rope.get("factor") or config["max_position_embeddings"] / context)
        attention = 1.0 if scale <= 1 else math.sqrt(1 + math.log(scale) / math.log(context))
    short, long = (
        tuple((frequencies / torch.tensor(rope[f"{name}_factor"], dtype=torch.float32)).tolist())
        for name in ("short", "long")
    )
    return Rotary(short, float(attention), int(context), long)
