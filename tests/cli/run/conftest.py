"""Replicas of `cbatch run` that share one engine."""

from __future__ import annotations

from typing import Any

import pytest

from cbatch.api import Engine
from cbatch.base.config import EngineConfig
from cbatch.cli.common import loading
from tests.support.in_process_replicas import InProcessLauncher


@pytest.fixture
def launchers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[InProcessLauncher]:
    """The launchers that commands have made. The second replica of each dies once."""
    made: list[InProcessLauncher] = []

    def make(options: Any, config: EngineConfig) -> InProcessLauncher:
        made.append(InProcessLauncher(engine, options.wanted, deaths={1: 1}))
        return made[-1]

    monkeypatch.setattr(loading, "make_launcher", make)
    return made
