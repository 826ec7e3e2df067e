"""Every causal architecture of the installed transformers gives its own greedy output, or is refused with a reason."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from cbatch.model.hf.attention_calls import AttentionCalls
from tests.support.architectures import CLASSES, NOT_BUILT_HERE
from tests.support.declared import declared_kinds
from tests.support.model_checks import (
    EQUAL,
    INSENSITIVE,
    NOT_BUILT,
    REFUSED,
    CheckResult,
    Fault,
    check_model,
    compare_combined_run,
    outcome,
    outcomes_in,
    with_fault,
)
from tests.support.planted_faults import leak_neighbour, shift_positions, widen_window
from tests.support.samples import sampled

pytestmark = pytest.mark.slow

TABLE = (Path(__file__).parents[2] / "docs" / "models.md").read_text(encoding="utf-8")
IS_DOCUMENTED = f"transformers {transformers.__version__}," in TABLE


@pytest.mark.parametrize("model_type", sampled(CLASSES, 25))
def test_equal_or_refused(model_type: str) -> None:
    """Guards against a family that is silently wrong, and against a table in the docs that says something else."""
    result = check_model(model_type, compare_combined_run)
    is_new = result.status == INSENSITIVE or (result.status == NOT_BUILT and model_type not in NOT_BUILT_HERE)
    if is_new and not IS_DOCUMENTED:
        pytest.skip(f"no test of {model_type} in transformers {transformers.__version__}: {result.reason}")
    assert result.status in (EQUAL, REFUSED, NOT_BUILT), result
    assert result.status != REFUSED or result.reason
    if IS_DOCUMENTED:
        assert (model_type, outcome(model_type, result)) in outcomes_in(TABLE)


@pytest.mark.skipif(not IS_DOCUMENTED, reason="docs/models.md is of another version of transformers")
def test_the_table_names_every_architecture_once() -> None:
    """Guards the counts in the docs, and against rows of what is no longer there."""
    said = outcomes_in(TABLE)
    assert sorted(name for name, _ in said) == sorted(CLASSES)
    for word in (EQUAL, REFUSED, NOT_BUILT):
        assert f"{sum(what.startswith(word) for _, what in said)} {word}" in TABLE, word


def test_the_page_names_every_declared_type() -> None:
    """Guards types with a fast path that no table has, such as those of text models inside others."""
    assert {kind for kind in declared_kinds() if f"`{kind}`" not in TABLE} == set()


def share_caches(patch: pytest.MonkeyPatch) -> None:
    """Calls that follow each other keep their keys and values in one place."""

    def attend(self: AttentionCalls, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> torch.Tensor:
        call, self.calls = self.calls, self.calls + 1
        keys, values = self.kv_cache.keys[call // 2], self.kv_cache.values[call // 2]
        metadata = self.metadata_on(query.device)
        self.backend.store_kv(keys, values, key, value, metadata)
        del options["indices"]
        return self.backend.attend(query, keys, values, metadata, window=self.windows[call], **options)

    patch.setattr(AttentionCalls, "attend", attend)


# Learned positions, rotary ones on all or half of a head, latent attention, sinks, shared keys, loops over layers.
FAULTS: dict[Fault, list[str]] = {
    shift_positions: ["gpt2", "opt", "gpt_neox", "deepseek_v3", "gpt_oss", "hrm_text"],
    leak_neighbour: ["gpt2", "llama", "deepseek_v3", "gemma4_text", "diffllama", "phimoe"],
    widen_window: ["mistral", "gemma3_text", "gpt_oss", "modernbert-decoder", "gemma4_text", "mimo_v2_flash"],
    share_caches: ["llama", "diffllama", "hrm_text", "longcat_flash"],
}


@pytest.mark.parametrize("fault", sampled([(plant, kind) for plant, kinds in FAULTS.items() for kind in kinds], 6))
def test_planted_faults_are_seen(fault: tuple[Fault, str]) -> None:
    """Guards the comparison itself: with a fault planted in a running engine it must fail, in families of all kinds."""
    plant, model_type = fault
    assert check_model(model_type, with_fault(plant)) == CheckResult("wrong", "combined")
