"""Packed weights in files that engines share: the same bits, once in memory, made once, kept within bounds, checked."""

from __future__ import annotations

import ctypes
import hashlib
import json
import logging
import os
import re
import select
import shutil
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from cbatch import ConfigError, Engine, EngineConfig
from cbatch.base.quantization import Quantization
from cbatch.kernels.cpu import program
from cbatch.model import packed_file
from cbatch.model.cpu import CpuModel
from cbatch.model.load_plan import DEMO_MODEL, LoadPlan
from cbatch.model.loader import load_fast_model
from cbatch.model.ops.cpu_layout import PACKING
from cbatch.model.packed_file import RECORD, Arrays, PackedFile, WeightCache
from cbatch.runtime.memory import device_memory
from tests.support.tiny_models import make_network

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="files are shared on Linux only")

CPU = torch.device("cpu")
make_sized = partial(make_network, hidden_size=64, intermediate_size=96, head_dim=16)
SHAPES = {"numbers": (2**18, np.dtype(np.float32)), "none": (0, np.dtype(np.uint16))}
MIB = 2**20


class Packer:
    """Counts how often weights are packed."""

    def __init__(self, folder: Path, limit: str = "100%") -> None:
        self.cache = WeightCache(folder, limit)
        self.packed: list[int] = []

    def open(self, number: int = 1) -> Any:
        """Weights that are all this number."""

        def fill(arrays: Arrays) -> None:
            self.packed.append(number)
            arrays["numbers"][:] = number

        arrays = PackedFile(self.cache, {"number": number}).arrays(SHAPES, fill)
        assert (arrays["numbers"] == number).all() and arrays["none"].shape == (0,)
        return arrays["numbers"]


@pytest.fixture
def packer(tmp_path: Path) -> Packer:
    return Packer(tmp_path / "weights")


def pages_of(pattern: str) -> list[dict[str, int]]:
    """The bytes that `/proc/self/smaps` counts for each mapped file whose path matches, by their names there."""
    found: list[dict[str, int]] = []
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if re.match(r"[0-9a-f]+-[0-9a-f]+ ", line):
            is_wanted = re.search(pattern, line) is not None
            found += [{}] * is_wanted and [{}]
        elif is_wanted and line.endswith(" kB"):
            name, size, _ = line.split()
            found[-1][name.rstrip(":")] = int(size) * 1024
    return found


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("family", "dtype"), [("llama", "float32"), ("qwen2", "bfloat16"), ("qwen2", "int8"), ("qwen3", "int4")]
)
def test_mapped_weights_are_the_same(family: str, dtype: str, tmp_path: Path) -> None:
    """Guards every bit of the weights, the number of their bytes, and the kernels against being compiled again."""
    network = make_sized(family)
    config, tensors = network.config.to_dict(), network.state_dict()
    number = torch.float32 if dtype == "float32" else torch.bfloat16
    quantize = Quantization(dtype) if dtype.startswith("int") else None
    shared = PackedFile(WeightCache(tmp_path, "100%"), {"model": family})
    own = CpuModel(config, tensors, number, quantize=quantize)
    compiled = len(program.run_step.signatures)  # type: ignore[attr-defined]
    first = CpuModel(config, tensors, number, quantize=quantize, shared=shared)
    unreadable = {name: tensor.to("meta") for name, tensor in tensors.items()}
    second = CpuModel(config, unreadable, number, quantize=quantize, shared=shared)
    for model in (first, second):
        for name, expected in own._weights._asdict().items():
            found = getattr(model._weights, name)
            assert np.array_equal(found, expected) and type(found) is type(expected), name
            assert not isinstance(found, np.ndarray) or (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert model.weight_bytes == own.weight_bytes and model.num_parameters == own.num_parameters
        assert model.linear_cost == own.linear_cost
    assert len(program.run_step.signatures) == compiled  # type: ignore[attr-defined]


@pytest.mark.kernels
@pytest.mark.parametrize("options", [{"dtype": "float32"}, {"dtype": "bfloat16"}, {"quantize": "int8"}], ids=str)
def test_engines_over_one_file(options: dict[str, Any], tmp_path: Path) -> None:
    """Guards outputs and keys, the weights' memory against copies of pages, and the file against other users."""
    folder = tmp_path / "new" / "weights"
    settings = {"kv_blocks": 16, "device": "cpu", **options}
    prompts, params = ["Hello there", "What is the capital of France?"], {"max_tokens": 12, "logprobs": 2}
    with Engine(**settings) as engine:
        expected, fingerprint = [result.to_dict() for result in engine.generate(prompts, params)], engine.fingerprint
    for _ in range(2):
        with Engine(**settings, weights_folder=str(folder)) as engine:
            assert [result.to_dict() for result in engine.generate(prompts, params)] == expected
            assert engine.fingerprint == fingerprint
            (pages,) = pages_of(re.escape(str(folder)))
            assert pages["Rss"] > 0.9 * engine.model.weight_bytes and pages["Anonymous"] == 0
    (file,) = folder.glob("*.weights")
    assert file.stat().st_mode & 0o777 == 0o600 and folder.stat().st_mode & 0o777 == 0o700
    assert not list(folder.glob("*.partial"))


@pytest.mark.kernels
def test_what_decides_the_weights_decides_the_name(tmp_path: Path) -> None:
    """Guards an engine against the weights of another dtype, or of a checkpoint that has changed between samples."""
    folder = shutil.copytree(DEMO_MODEL, tmp_path / "model")

    def count_files(dtype: str, **options: Any) -> int:
        assert load_fast_model(
            LoadPlan(str(folder), dtype=dtype, weight_cache=WeightCache(tmp_path / "weights"), **options)
        )
        return len(list(tmp_path.glob("weights/*.weights")))

    assert [count_files("float32"), count_files("float32"), count_files("bfloat16")] == [1, 1, 2]
    assert count_files("bfloat16", quantize=Quantization("int8")) == 3
    (weights,) = folder.glob("*.safetensors")
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1))
    assert count_files("float32") == 4
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 2e-5}))
    assert count_files("float32") == 5


@pytest.mark.kernels
def test_the_order_of_packed_numbers_has_a_version() -> None:
    """Guards files that an older version left: who changes the order raises `PACKING["version"]`, then this hash."""
    network = make_sized("qwen2")
    digest = hashlib.blake2b(digest_size=8)
    for number, quantize in (
        (torch.float32, None),
        (torch.bfloat16, None),
        *((torch.bfloat16, Quantization(one)) for one in ("int8", "int4")),
    ):
        tensors = {
            name: (torch.arange(tensor.numel()) % 251 - 125).reshape(tensor.shape) / 128
            for name, tensor in network.state_dict().items()
        }
        weights = CpuModel(network.config.to_dict(), tensors, number, quantize=quantize)._weights
        for part in weights:
            digest.update(part.tobytes() if isinstance(part, np.ndarray) else b"")
    assert (PACKING["version"], digest.hexdigest()) == (4, "f71582db951bb290")


@contextmanager
def child(work: Callable[[], None]) -> Iterator[int]:
    """A process that does this and ends; it is killed if it has not ended by itself."""
    pid = os.fork()
    if pid == 0:
        try:
            work()
            os._exit(0)
        finally:
            os._exit(1)
    try:
        yield pid
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def received(pipe: int, count: int) -> bytes:
    """So many bytes, each of another process; fewer if one does not come within 20 s."""
    found = b""
    while len(found) < count and select.select([pipe], [], [], 20)[0]:
        found += os.read(pipe, 1)
    return found


def test_processes_that_start_at_once(tmp_path: Path) -> None:
    """Guards memory: one process packs and the others wait, one that is killed blocks nobody, and pages count once."""
    read, write = os.pipe()
    filled = tmp_path / "filled"

    def pack_forever() -> None:
        def stall(arrays: Arrays) -> None:
            os.write(write, b".")
            signal.pause()

        PackedFile(Packer(tmp_path).cache, {"number": 1}).arrays(SHAPES, stall)

    def use() -> None:
        packer = Packer(tmp_path)
        numbers = packer.open()
        with filled.open("ab") as file:
            file.write(b"." * len(packer.packed))
        os.write(write, b"+" if len(numbers) else b"-")
        os.read(ready, 1)
        (pages,) = pages_of(re.escape(str(tmp_path)))
        os.write(write, b"+" if pages["Pss"] <= pages["Rss"] / 3 + 4096 and not pages["Anonymous"] else b"-")
        os.read(ready, 1)

    ready, go = os.pipe()
    with child(pack_forever) as packer:
        assert received(read, 1) == b"."
        with child(use), child(use), child(use):
            os.kill(packer, signal.SIGKILL)
            assert received(read, 3) == b"+++"
            os.write(go, b"...")
            assert received(read, 3) == b"+++"
    assert filled.read_bytes() == b"."
    for end in (read, write, ready, go):
        os.close(end)
    assert not list(tmp_path.glob("*.partial"))


def write_at(file: Path, place: int, content: bytes) -> None:
    with file.open("r+b") as opened:
        opened.seek(place)
        opened.write(content)


def record_of(file: Path) -> Path:
    return file.with_name(file.name + RECORD)


def restart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_file, "_boot", lambda: "another")


DAMAGES: dict[str, Callable[[Path], object]] = {
    "cut": lambda file: os.truncate(file, file.stat().st_size - 4096),
    "header": lambda file: write_at(file, 0, b"["),
    "open to others": lambda file: file.chmod(0o640),
    "a link": lambda file: file.symlink_to(file.rename(file.with_name("elsewhere")).name),
    "a folder": lambda file: (file.unlink(), file.symlink_to("/")),
    "a bit": lambda file: write_at(file, 700_001, bytes([file.read_bytes()[700_001] ^ 4])),
    "a page": lambda file: write_at(file, 3 * 4096, bytes(4096)),  # as after a crash, when the disk never got it
    "no record": lambda file: record_of(file).unlink(),
    "a nested record": lambda file: record_of(file).write_text("[" * 5000),
    "a record that is no object": lambda file: record_of(file).write_text("[1]"),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("is_restarted", [False, True])
def test_a_spoiled_file_is_made_anew(
    damage: str, is_restarted: bool, packer: Packer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards against weights that are torn, that a disk has changed, or that others could write."""
    packer.open()
    (file,) = packer.cache.folder.glob("*.weights")
    times = file.stat().st_atime_ns, file.stat().st_mtime_ns
    DAMAGES[damage](file)
    if is_restarted:
        restart(monkeypatch)
        if not file.is_symlink():
            os.utime(file, ns=times)
    for _ in range(2):
        packer.open()
    assert packer.packed == [1, 1] and file.is_file() and not file.is_symlink()


def test_a_restart_keeps_weights(packer: Packer, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the second start: nothing is packed, and the whole file is read once after a restart, not each time."""
    packer.open(1)
    restart(monkeypatch)
    packer.open(1)
    monkeypatch.setattr(packed_file._Mapping, "checksum", None)
    packer.open(1)
    assert packer.packed == [1]


def test_writing_harms_nobody_else(packer: Packer) -> None:
    """Guards the other engines against a kernel that writes where it should not."""
    ours, theirs = packer.open(), packer.open()
    ours[5] = 7
    assert theirs[5] == 1 and packer.open()[5] == 1 and packer.packed == [1]


def test_arrays_begin_with_a_line_of_a_huge_page(packer: Packer) -> None:
    """Guards the speed of a step, which fell by a fifth where the file could not have huge pages."""
    address = packer.open().ctypes.data
    assert (address - packed_file._HEADER_BYTES) % (2 * MIB) == 0 and address % 64 == 0


def test_a_failed_pack_leaves_nothing(packer: Packer) -> None:
    """Guards the next process against a half of a file, and the disk against its size."""

    def fail(arrays: Arrays) -> None:
        raise ValueError("a broken checkpoint")

    with pytest.raises(ValueError, match="a broken checkpoint"):
        PackedFile(packer.cache, {"number": 1}).arrays(SHAPES, fail)
    assert [path.suffix for path in packer.cache.folder.iterdir()] == [".lock"]
    packer.open()


PROBLEMS: dict[str, Callable[[pytest.MonkeyPatch, Path], object]] = {
    r"its disk has 400\.0 KiB left, and they need 64\.3 MiB": lambda patch, folder: patch.setattr(
        os, "fstatvfs", lambda file: SimpleNamespace(f_bavail=100, f_frsize=4096)
    ),
    "Cannot allocate memory": lambda patch, folder: patch.setattr(
        packed_file, "_system_mmap", lambda: lambda *arguments: (ctypes.set_errno(12), 2**64 - 1)[1]
    ),
    "is open to other users": lambda patch, folder: folder.chmod(0o770),
    "weights is open to other users": lambda patch, folder: patch.setattr(os, "geteuid", lambda: 4242),
    "Not a directory|Too many levels": lambda patch, folder: folder.symlink_to(
        folder.rename(folder.with_name("target")).name
    ),
}


@pytest.mark.kernels
@pytest.mark.parametrize("reason", PROBLEMS)
def test_without_a_file_an_engine_has_its_own_weights(
    reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Guards a run whose folder has no room or cannot be trusted: it goes on, and one line says why."""
    network, folder = make_sized("llama"), tmp_path / "weights"
    folder.mkdir(mode=0o700)
    PROBLEMS[reason](monkeypatch, folder)
    with caplog.at_level(logging.WARNING, "cbatch"):
        shared = PackedFile(WeightCache(folder, "100%"), {"model": 1})
        model = CpuModel(network.config.to_dict(), network.state_dict(), torch.float32, shared=shared)
    (line,) = [record.getMessage() for record in caplog.records if "Packed weights" in record.getMessage()]
    assert re.search(reason, line) and not list(folder.glob("*.weights")) and model.weight_bytes > 0


def test_mapped_weights_count_as_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a KV cache for which weights would leave memory: the system calls a file's pages available."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100 * MIB))
    memory = device_memory(CPU)
    numbers = Packer(tmp_path).open()
    taken = 100 * MIB - memory.free()
    assert taken == (0 if packed_file._is_in_memory(os.open(tmp_path, os.O_RDONLY)) else MIB + 4096)
    del numbers
    assert memory.free() == 100 * MIB


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


def test_removing_files(packer: Packer) -> None:
    """Guards somebody who removes all files while an engine runs: what is mapped stays readable."""
    numbers = packer.open(1)
    assert packer.cache.describe().startswith("1.0 MiB in ")
    for file in packer.cache.folder.iterdir():
        file.unlink()
    assert packer.cache.files() == [] and (numbers == 1).all() and (packer.open(2) == 2).all()


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
