"""Reports of what keeps numba from compiling, before it is needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import numba
import pytest

from cbatch.base.errors import ConfigError
from cbatch.runtime.numba_setup import require_compiler, why_not_trusted


def test_a_compiler_that_is_switched_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards NUMBA_DISABLE_JIT, with which kernels are Python functions that nobody can call by an address."""
    require_compiler()
    monkeypatch.setattr(numba.config, "DISABLE_JIT", 1)
    with pytest.raises(ConfigError, match="NUMBA_DISABLE_JIT is set; unset it"):
        require_compiler()


def test_variables_that_numba_cannot_read() -> None:
    """Guards stderr against the traceback that numba prints for each of them, and the user against silence."""
    program = "from cbatch.runtime.numba_setup import prepare_numba; prepare_numba()"
    environment = os.environ | {"NUMBA_OPT": "nine"}
    done = subprocess.run([sys.executable, "-c", program], env=environment, capture_output=True, text=True)
    assert done.returncode == 0
    assert done.stderr.startswith("numba ignores a variable: ") and "'NUMBA_OPT'" in done.stderr
    assert done.stderr.count("\n") == 1


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "cache" / "kernels"
    made.mkdir(parents=True)
    made.chmod(0o755)
    made.parent.chmod(0o755)
    return made


def test_folders_that_others_may_write_to(folder: Path) -> None:
    """Guards against code that other users have put into a cache, or into the folder around it."""
    assert why_not_trusted(folder, Path(__file__)) is None
    folder.chmod(0o777)
    assert why_not_trusted(folder, Path(__file__)) == f"other users may write to {folder}"
    folder.chmod(0o1777)  # they may add files
    assert why_not_trusted(folder, Path(__file__)) == f"other users may write to {folder}"
    folder.chmod(0o755)
    folder.parent.chmod(0o777)
    assert why_not_trusted(folder, Path(__file__)) == f"other users may write to {folder.parent}"
    folder.parent.chmod(0o1777)  # like /tmp, where nobody replaces a folder of others
    assert why_not_trusted(folder, Path(__file__)) is None


def test_folders_of_others(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a cache that another user has made before; the owner of the program may change all that runs."""
    source = tmp_path / "kernels.py"
    source.touch()
    stat = Path.stat

    def of_user(path: Path, **options: bool) -> os.stat_result:
        values = list(stat(path, **options))
        values[4] = owners.get(path, os.geteuid())
        return os.stat_result(values)

    monkeypatch.setattr(Path, "stat", of_user)
    owners = {folder: 54321}
    assert why_not_trusted(folder, source) == f"{folder} belongs to another user"
    owners = {folder: 54321, source: 54321}
    assert why_not_trusted(folder, source) is None
    owners = {folder: 0, folder.parent: 54321}
    assert why_not_trusted(folder, source) == f"{folder.parent} belongs to another user"


def test_groups_of_one_user_are_trusted(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the many systems on which new files are writable for the user's own group, and the other groups."""
    folder.chmod(0o775)
    monkeypatch.setattr("cbatch.runtime.numba_setup._is_private_group", lambda number: True)
    assert why_not_trusted(folder, Path(__file__)) is None
    monkeypatch.setattr("cbatch.runtime.numba_setup._is_private_group", lambda number: False)
    assert why_not_trusted(folder, Path(__file__)) == f"other users may write to {folder}"
