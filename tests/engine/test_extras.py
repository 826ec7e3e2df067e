"""Packages that are missing: the command that installs them, and engines that refuse what needs them."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cbatch import Engine, EngineConfig, extras
from cbatch.base.errors import ConfigError
from tests.support.tiny_models import loaded, make_network

REGISTRY = "pip install 'cbatch[plot]'"


def test_extras_are_those_of_the_project() -> None:
    """Guards names that pip does not know."""
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    for package, (extra, _) in extras.EXTRAS.items():
        name = "pillow" if package == "PIL" else package
        assert any(line.startswith(name) for line in project["optional-dependencies"][extra]), package


def test_a_checkout_installs_from_its_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards a checkout, where the name would ask a registry: `.` inside of it, its path elsewhere."""
    folder = tmp_path / "my clone"
    folder.mkdir()
    (folder / "pyproject.toml").touch()
    monkeypatch.setattr(extras, "ROOT", folder)
    monkeypatch.chdir(tmp_path)
    assert extras.install_command("plot") == f"pip install -e '{folder}[plot]'"
    monkeypatch.chdir(folder)
    assert extras.install_command("plot") == "pip install -e '.[plot]'"


@pytest.mark.parametrize(
    ("origin", "command"),
    [
        (None, REGISTRY),
        ("no JSON", REGISTRY),
        ({"url": "file:///home/me/my%20clone", "dir_info": {}}, "pip install '/home/me/my clone[plot]'"),
        (
            {"url": "https://host/cbatch.git", "vcs_info": {"vcs": "git", "commit_id": "abc"}},
            "pip install 'cbatch[plot] @ git+https://host/cbatch.git@abc'",
        ),
        (
            {"url": "file:///tmp/cbatch.whl", "archive_info": {}},
            "pip install 'cbatch[plot] @ file:///tmp/cbatch.whl'",
        ),
    ],
)
def test_others_install_from_where_they_came(
    origin: Any, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards installed packages: from a registry, a folder, a repository and a wheel."""
    text = origin if origin is None or isinstance(origin, str) else json.dumps(origin)
    monkeypatch.setattr(extras, "ROOT", tmp_path)
    monkeypatch.setattr(extras, "distribution", lambda name: SimpleNamespace(read_text=lambda file: text))
    assert extras.install_command("plot") == command


def test_what_is_not_installed_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the check that imports nothing, and its sentence."""
    extras.require_package("llguidance")
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(ConfigError, match=r"^Pictures need matplotlib: pip install .*\[plot\]'\.$"):
        extras.require_package("matplotlib")


def test_an_engine_refuses_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards calls of Python without llguidance: one error, not one for each prompt; other prompts run."""
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with Engine(EngineConfig(device="cpu", kv_blocks=16), loaded=loaded(make_network("llama"))) as engine:
        for params in ({"regex": "a+"}, {"guided_json": {"type": "object"}}):
            with pytest.raises(ConfigError, match=r"Structured output needs llguidance: pip install"):
                engine.generate([[1, 2], [3]], params)
            with pytest.raises(ConfigError, match="llguidance"):
                engine.map([[1, 2]], params=params)
        assert len(engine.generate([[1, 2]], {"max_tokens": 2})[0].token_ids) == 2
