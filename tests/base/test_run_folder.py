"""The temporary folder of a run: private, and gone when the run is over, however it ended."""

from __future__ import annotations

import fcntl
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest

from cbatch.base import run_folder
from cbatch.base.run_folder import RunFolder


def test_a_killed_run_leaves_nothing_for_long(tmp_path: Path) -> None:
    """Guards disks against gigabytes of every run that was killed, and running programs against those that tidy up."""
    running, killed = RunFolder("weights", tmp_path), RunFolder("weights", tmp_path)
    (killed.path / "large").write_bytes(b"x")
    (running.path / "large").write_bytes(b"x")
    (tmp_path / "cbatch-other-1").mkdir()
    assert killed._lock is not None
    os.close(killed._lock)  # as the system does
    last = RunFolder("weights", tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {running.path.name, last.path.name, "cbatch-other-1"}
    assert stat.S_IMODE(last.path.stat().st_mode) == 0o700
    for folder in (running, last):
        folder.close()
        folder.close()
    assert [path.name for path in tmp_path.iterdir()] == ["cbatch-other-1"]


def test_folders_of_others_and_links_stay(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards what another user, or a link of the same name, has in the folder for temporary files."""
    target = tmp_path / "target"
    target.mkdir()
    (target / "kept").touch()
    (tmp_path / "cbatch-weights-link").symlink_to(target)
    (tmp_path / "cbatch-weights-file").touch()
    RunFolder("weights", tmp_path).close()
    assert (target / "kept").exists() and (tmp_path / "cbatch-weights-file").exists()
    (tmp_path / "cbatch-weights-theirs").mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "geteuid", lambda: 4242)
        run_folder._remove_if_left(tmp_path / "cbatch-weights-theirs")
    assert (tmp_path / "cbatch-weights-theirs").exists()


@pytest.mark.parametrize("moment", ["mkdtemp", "flock"])
def test_a_folder_that_was_tidied_up_too_early_is_made_again(
    moment: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards two runs that start at once: one sees the other's folder before it is locked, and removes it."""
    made: list[Path] = []
    mkdtemp, flock = tempfile.mkdtemp, fcntl.flock

    def make(**names: Any) -> str:
        made.append(Path(mkdtemp(**names)))
        if moment == "mkdtemp" and len(made) == 1:
            made[0].rmdir()
        return str(made[-1])

    def lock(folder: int, operation: int) -> None:
        if moment == "flock" and len(made) == 1:
            made[0].rmdir()
        flock(folder, operation)

    monkeypatch.setattr(tempfile, "mkdtemp", make)
    monkeypatch.setattr(fcntl, "flock", lock)
    folder = RunFolder("weights", tmp_path)
    assert len(made) == 2 and folder.path == made[1] and folder.path.is_dir()
    folder.close()
