"""What a command says of the model that it has loaded."""

from __future__ import annotations

from dataclasses import replace

import pytest

from cbatch.api import Engine
from cbatch.cli.common.loading import show_loaded


def test_what_a_model_asks_for_in_vain_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards people against a generation_config.json that is followed only in part, also on replicas."""
    with Engine() as engine:
        assert "not applied" not in engine.core.describe()
        engine.core.loaded = replace(engine.core.loaded, not_applied=("num_beams", "eta_cutoff"))
        show_loaded(engine.core.describe(), is_demo=False, verbose=True)
    said = capsys.readouterr().err
    assert "generation_config.json asks for num_beams, eta_cutoff, which this version does not apply" in said
    assert "parameters: 4.7 million" in said and "context: 1,024 tokens" in said
