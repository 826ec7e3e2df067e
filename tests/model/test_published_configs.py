"""The config.json of models as they were published: which path each takes, and that it is right there."""

from __future__ import annotations

import json

import pytest

from tests.support.published_configs import (
    EXPECTED,
    FAST,
    REFUSED,
    error_in,
    names,
    path_of,
    published,
    same_small_models,
)
from tests.support.samples import sampled

EXPECTED_PATHS: dict[str, str] = json.loads(EXPECTED.read_text(encoding="utf-8"))
ON_FAST_PATH = [name for name, path in EXPECTED_PATHS.items() if path == FAST]
KINDS = {published(name)["model_type"]: name for name in ON_FAST_PATH}
"""One of each type."""


@pytest.mark.parametrize("part", sampled(range(8), 1))
def test_published_files_take_the_paths_that_are_expected(part: int) -> None:
    """Guards real files, with all the keys that tools leave in them and without those that equal a default."""
    expected = {name: EXPECTED_PATHS[name] for name in names()[part::8]}
    assert {name: path_of(name) for name in expected} == expected, "python -m scripts.real_checkpoints --write"


def test_most_published_files_take_the_fast_path() -> None:
    """Guards the list that is expected: most are fast, and refused is only what transformers does not have, but one."""
    assert EXPECTED_PATHS.keys() == set(names())
    had = [path for path in EXPECTED_PATHS.values() if "transformers has no model type" not in path]
    assert len(had) > 100 and had.count(FAST) / len(had) >= 0.85
    assert {path for path in had if path.startswith(REFUSED)} == {
        "refused: it has layers of type compressed_sparse_attention, heavily_compressed_attention, which this engine "
        "does not support"
    }


@pytest.mark.kernels
@pytest.mark.parametrize("kind", sampled(sorted(KINDS), 3, keep=["gemma3", "nemotron_h"]))
def test_small_models_with_published_settings_are_right(kind: str) -> None:
    """Guards settings that only published files have: the fast path gives the logits of transformers."""
    assert error_in(KINDS[kind]) < 2e-4


@pytest.mark.parametrize("key", ["rope_theta", "rope_scaling"])
def test_a_renamed_key_is_noticed(key: str) -> None:
    """Guards the comparison: without a key that matters the logits are others."""
    assert error_in("meta-llama/Llama-3.2-1B-Instruct", renamed=key) > 1e-3


@pytest.mark.exhaustive
def test_all_published_settings_are_right() -> None:
    """Guards the rest of the published files; those that differ in sizes only are compared once."""
    wrong = {group[0]: error for group in same_small_models(ON_FAST_PATH) if not (error := error_in(group[0])) < 2e-4}
    assert wrong == {}
