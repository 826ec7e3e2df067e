"""Checks a generation_config.json: what of it the engine or transformers uses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cbatch.base.config_checks.kinds import Either, Flag, Kind, Number, Text, Texts, Whole, check_settings
from cbatch.base.model_files import read_json_object

_TOKENS = 2**31 - 1
_TOKEN_IDS = Whole(-(2**31), 2**31 - 1, is_listed=True)

FIELDS: dict[str, Kind] = {
    "do_sample": Flag(),
    "temperature": Number(0, 1000),
    "top_p": Number(0, 1),
    "min_p": Number(0, 1),
    "typical_p": Number(0, 1),
    "top_k": Whole(-1, _TOKENS),
    "repetition_penalty": Number(0.01, 100),
    "max_new_tokens": Whole(1, _TOKENS),
    "min_new_tokens": Whole(0, _TOKENS),
    "max_length": Whole(0, _TOKENS),
    "min_length": Whole(0, _TOKENS),
    "num_beams": Whole(1, _TOKENS),
    "no_repeat_ngram_size": Whole(0, _TOKENS),
    "stop_strings": Either(Text(), Texts(1024)),
    **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id"), _TOKEN_IDS),
}


def read_generation_config(folder: Path) -> dict[str, Any]:
    """The generation_config.json of a folder; empty if there is none. Raises InvalidFile for a wrong setting."""
    path = folder / "generation_config.json"
    settings = read_json_object(path)
    check_settings(settings, FIELDS, path)
    return settings
