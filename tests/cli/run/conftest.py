"""Fixtures of `cbatch run`: the rows of a module, its whole output, and replicas that share one engine."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cbatch.api import Engine
from cbatch.base.config import EngineConfig
from cbatch.cli.common import loading
from tests.support.command import Command
from tests.support.in_process_replicas import InProcessLauncher


@pytest.fixture
def command(command: Command, capfd: pytest.CaptureFixture[str]) -> Command:
    command.printed = capfd
    return command


@pytest.fixture
def rows_written(command: Command, request: pytest.FixtureRequest) -> None:
    """Gives the command the ROWS of the test's module as its input."""
    command.write(request.module.ROWS)


@pytest.fixture(scope="module")
def whole(model_folder: Path, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> bytes:
    """The output of a run of the module's ROWS that nothing broke off."""
    command = Command(tmp_path_factory.mktemp("whole"), model_folder, request.module.ROWS)
    assert command() == 1
    return command.data


@pytest.fixture
def launchers(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> list[InProcessLauncher]:
    """The launchers that commands have made. The second replica of each dies once."""
    made: list[InProcessLauncher] = []

    def make(options: Any, config: EngineConfig) -> InProcessLauncher:
        made.append(InProcessLauncher(engine, options.wanted, deaths={1: 1}))
        return made[-1]

    monkeypatch.setattr(loading, "make_launcher", make)
    return made
