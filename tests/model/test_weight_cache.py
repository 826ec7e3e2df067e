"""The folder of packed weights: bounded, kept over restarts, checked, and never in the way of an engine."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cbatch import ConfigError, Engine, EngineConfig
from cbatch.model import packed_file
from cbatch.model.packed_file import Arrays, ArrayShape, PackedFile, WeightCache

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="weights are kept on Linux only")

MIB = 2**20
SHAPES = {"numbers": ArrayShape((2**18,), np.dtype(np.float32))}


class Packer:
    """Counts how often weights are packed."""

    def __init__(self, folder: Path, limit: str = "100%") -> None:
        self.cache = WeightCache(folder, limit)
        self.packed: list[int] = []

    def open(self, number: int) -> Any:
        """Weights that are all this number."""

        def fill(arrays: Arrays) -> None:
            self.packed.append(number)
            arrays["numbers"][:] = number

        numbers = PackedFile(self.cache, {"number": number}).arrays(SHAPES, fill)["numbers"]
        assert (numbers == number).all()
        return numbers


@pytest.fixture
def packer(tmp_path: Path) -> Packer:
    return Packer(tmp_path / "weights")


def restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_file, "_boot", lambda: "another")


def test_a_restart_keeps_weights(packer: Packer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the second start: nothing is packed, and the whole file is read once after a restart, not each time."""
    packer.open(1)
    restart(monkeypatch)
    packer.open(1)
    monkeypatch.setattr(packed_file._Mapping, "checksum", None)
    packer.open(1)
    assert packer.packed == [1]


def flip_a_bit(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.seek(700_001)
        (byte,) = opened.read(1)
        opened.seek(-1, os.SEEK_CUR)
        opened.write(bytes([byte ^ 4]))


def lose_a_page(file: Path) -> None:
    """As after a crash, when the disk never got it."""
    with file.open("r+b") as opened:
        opened.seek(3 * 4096)
        opened.write(bytes(4096))


def lose_the_record(file: Path) -> None:
    file.with_name(file.name + ".record").unlink()


def spoil_the_record(file: Path) -> None:
    file.with_name(file.name + ".record").write_text("[1]")


@pytest.mark.parametrize("damage", [flip_a_bit, lose_a_page, lose_the_record, spoil_the_record])
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_spoiled_file_is_made_anew(
    damage: Any, is_restarted: bool, packer: Packer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against answers from weights that a crash or a disk has changed, where times tell nothing, too."""
    packer.open(1)
    (file,) = packer.cache.folder.glob("*.weights")
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    damage(file)
    if is_restarted:
        os.utime(file, ns=times)
        restart(monkeypatch)
    packer.open(1)
    packer.open(1)
    assert packer.packed == [1, 1]


def test_what_was_used_longest_ago_goes_first(tmp_path: Path) -> None:
    """Guards the disk against many models, and engines against losing weights that they have mapped."""
    packer = Packer(tmp_path, f"{2 * MIB + 100_000}")
    first, _, _ = packer.open(1), packer.open(2), packer.open(1)
    packer.open(3)
    assert len(packer.cache.files()) == 2
    packer.open(1)
    assert packer.packed == [1, 2, 3]
    packer.open(2)
    assert packer.packed == [1, 2, 3, 2] and len(packer.cache.files()) == 2
    packer.open(4)
    assert (first == 1).all()
    with pytest.raises(OSError, match=r"they take 1\.0 MiB, and it may hold 1\.0 KiB"):
        Packer(tmp_path, "1KiB").open(5)
    assert len(packer.cache.files()) == 2


def test_half_a_file_of_a_dead_process_goes(packer: Packer) -> None:
    """Guards the disk against what a killed process had written of another model."""
    packer.open(1)
    (file,) = packer.cache.folder.glob("*.weights")
    left = file.rename(file.with_name("0123.weights.partial"))
    packer.open(2)
    assert not left.exists()


def test_clearing(packer: Packer) -> None:
    """Guards `cbatch info --clear-weight-cache`: all files go, and what is mapped stays readable."""
    numbers = packer.open(1)
    assert packer.cache.describe().startswith("1.0 MiB in ") and packer.cache.clear() > MIB
    assert packer.cache.files() == [] and (numbers == 1).all() and packer.cache.clear() == 0


def test_where_weights_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards the place against relative paths, and a user without a home against an engine that does not start."""
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)

    def folder(**options: Any) -> Path | None:
        cache = WeightCache.of_config(EngineConfig(**options))
        return cache and cache.folder

    assert folder() == tmp_path / ".cache/cbatch/weights"
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    assert folder() == tmp_path / ".cache/cbatch/weights"
    monkeypatch.setenv("XDG_CACHE_HOME", "/x")
    assert folder() == Path("/x/cbatch/weights") and folder(weights_folder="/mine") == Path("/mine")
    assert folder(weight_cache=False) is None and folder(weight_cache=False, weights_folder="/mine") is None

    def no_home() -> Path:
        raise RuntimeError

    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setattr(Path, "home", no_home)
    assert folder() is None and "there is no home directory" in caplog.text


@pytest.mark.kernels
def test_engines_keep_large_weights(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the default: weights worth it are kept in the user's folder, small ones and those refused are not."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    folder = tmp_path / "cbatch" / "weights"

    def files(**options: Any) -> int:
        with Engine(device="cpu", kv_blocks=16, **options):
            return len(list(folder.glob("*.weights")))

    assert files() == 0
    monkeypatch.setattr(packed_file, "LEAST_BYTES", 0)
    assert files(weight_cache=False) == 0 and files() == 1
    with pytest.raises(ConfigError, match="'much' is not an amount of memory"):
        files(weight_cache_size="much")
