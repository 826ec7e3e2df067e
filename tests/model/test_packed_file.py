"""Packed weights in a file that engines share: the same bits, once in memory, made once, and never a wrong one."""

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
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import psutil
import pytest
import torch

from cbatch import ConfigError, Engine, EngineConfig
from cbatch.base.quantization import WEIGHTS, Quantization
from cbatch.kernels.cpu import program
from cbatch.model import packed_file
from cbatch.model.cpu import CpuModel
from cbatch.model.load_plan import DEMO_MODEL, LoadPlan
from cbatch.model.loader import load_fast_model
from cbatch.model.ops.cpu_layout import PACKING
from cbatch.model.packed_file import RECORD, Arrays, ArrayShape, PackedFile, WeightCache
from cbatch.runtime.memory import device_memory
from tests.support.tiny_models import draw_weights, make_network

pytestmark = pytest.mark.skipif(not hasattr(os, "posix_fallocate"), reason="files are shared on Linux only")

CPU = torch.device("cpu")
SIZES = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16}
SHAPES = {"numbers": ArrayShape((3, 1 << 20), np.dtype(np.float32)), "none": ArrayShape((0, 2), np.dtype(np.uint16))}
MIB = 2**20


def network_of(family: str) -> Any:
    network = make_network(family, **SIZES)
    draw_weights(network)
    return network


def packed_file_in(folder: Path, content: dict[str, Any]) -> PackedFile:
    return PackedFile(WeightCache(folder, "100%"), content)


def fill(arrays: Arrays) -> None:
    arrays["numbers"][:] = np.arange(3)[:, None]


def never(arrays: Arrays) -> None:
    raise AssertionError("the file is there")


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
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8", "int4"])
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3"])
def test_mapped_weights_are_the_same(family: str, dtype: str, tmp_path: Path) -> None:
    """Guards every bit of the weights, the number of their bytes, and the kernels against being compiled again."""
    network = network_of(family)
    config, tensors = network.config.to_dict(), network.state_dict()
    number = torch.float32 if dtype == "float32" else torch.bfloat16
    quantize = Quantization(dtype) if dtype.startswith("int") else None
    shared = packed_file_in(tmp_path, {"model": family})
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
    network = network_of("qwen2")
    digest = hashlib.blake2b(digest_size=8)
    for number, quantize in (
        (torch.float32, None),
        (torch.bfloat16, None),
        *((torch.bfloat16, Quantization(one)) for one in WEIGHTS),
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
            fill(arrays)
            os.write(write, b".")
            signal.pause()

        packed_file_in(tmp_path, {}).arrays(SHAPES, stall)

    def use() -> None:
        def count(arrays: Arrays) -> None:
            with filled.open("ab") as file:
                file.write(b".")
            fill(arrays)

        numbers = packed_file_in(tmp_path, {}).arrays(SHAPES, count)["numbers"]
        assert (numbers == np.arange(3)[:, None]).all()
        os.write(write, b"+")
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


def cut(file: Path) -> None:
    os.truncate(file, file.stat().st_size - 4096)


def change_header(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.write(b"[")


def open_to_others(file: Path) -> None:
    file.chmod(0o640)


def replace_by_link(file: Path) -> None:
    file.rename(file.with_name("elsewhere"))
    file.symlink_to("elsewhere")


def replace_by_folder(file: Path) -> None:
    file.unlink()
    file.symlink_to("/")


def nest_the_record(file: Path) -> None:
    file.with_name(file.name + RECORD).write_text("[" * 5000)


@pytest.mark.parametrize(
    "damage", [cut, change_header, open_to_others, replace_by_link, replace_by_folder, nest_the_record]
)
def test_a_file_that_is_not_ours_is_replaced(damage: Callable[[Path], None], tmp_path: Path) -> None:
    """Guards against weights that are torn, or that somebody else could write."""
    packed_file_in(tmp_path, {}).arrays(SHAPES, fill)
    (file,) = tmp_path.glob("*.weights")
    damage(file)
    calls = 0

    def count(arrays: Arrays) -> None:
        nonlocal calls
        calls += 1
        fill(arrays)

    for _ in range(2):
        arrays = packed_file_in(tmp_path, {}).arrays(SHAPES, count)
        assert (arrays["numbers"] == np.arange(3)[:, None]).all() and arrays["none"].shape == (0, 2)
    assert calls == 1
    assert file.is_file() and not file.is_symlink()


def test_writing_harms_nobody_else(tmp_path: Path) -> None:
    """Guards the other engines against a kernel that writes where it should not."""
    ours, theirs = (packed_file_in(tmp_path, {}).arrays(SHAPES, fill)["numbers"] for _ in range(2))
    ours[1, 5] = 7
    assert theirs[1, 5] == 1 and packed_file_in(tmp_path, {}).arrays(SHAPES, never)["numbers"][1, 5] == 1


def test_arrays_begin_with_a_line_of_a_huge_page(tmp_path: Path) -> None:
    """Guards the speed of a step, which fell by a fifth where the file could not have huge pages."""
    arrays = packed_file_in(tmp_path, {}).arrays(SHAPES, fill)
    address = arrays["numbers"].ctypes.data
    assert (address - packed_file._HEADER_BYTES) % (2 * MIB) == 0 and address % 64 == 0


def test_a_failed_pack_leaves_nothing(tmp_path: Path) -> None:
    """Guards the next process against a half of a file, and the disk against its size."""

    def fail(arrays: Arrays) -> None:
        raise ValueError("a broken checkpoint")

    with pytest.raises(ValueError, match="a broken checkpoint"):
        packed_file_in(tmp_path, {}).arrays(SHAPES, fail)
    assert [path.suffix for path in tmp_path.iterdir()] == [".lock"]
    packed_file_in(tmp_path, {}).arrays(SHAPES, fill)


def no_room(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(os, "fstatvfs", lambda file: SimpleNamespace(f_bavail=100, f_frsize=4096))


def no_addresses(patch: pytest.MonkeyPatch, folder: Path) -> None:
    def fail(*arguments: Any) -> int:
        ctypes.set_errno(12)
        return 2**64 - 1

    patch.setattr(packed_file, "_system_mmap", lambda: fail)


def somebody_elses(patch: pytest.MonkeyPatch, folder: Path) -> None:
    patch.setattr(os, "geteuid", lambda: 4242)


def group_may_write(patch: pytest.MonkeyPatch, folder: Path) -> None:
    folder.chmod(0o770)


def a_link(patch: pytest.MonkeyPatch, folder: Path) -> None:
    folder.rename(folder.with_name("target"))
    folder.symlink_to("target")


@pytest.mark.kernels
@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (no_room, r"its disk has 400\.0 KiB left, and they need 64\.3 MiB"),
        (no_addresses, "Cannot allocate memory"),
        (somebody_elses, "is open to other users"),
        (group_may_write, "is open to other users"),
        (a_link, "Not a directory|Too many levels"),
    ],
)
def test_without_a_file_an_engine_has_its_own_weights(
    problem: Callable[[pytest.MonkeyPatch, Path], None],
    reason: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Guards a run whose folder has no room or cannot be trusted: it goes on, and one line says why."""
    network, folder = network_of("llama"), tmp_path / "weights"
    folder.mkdir(mode=0o700)
    problem(monkeypatch, folder)
    with caplog.at_level(logging.WARNING, "cbatch"):
        model = CpuModel(
            network.config.to_dict(), network.state_dict(), torch.float32, shared=packed_file_in(folder, {"model": 1})
        )
    (line,) = [record.getMessage() for record in caplog.records if "Packed weights" in record.getMessage()]
    assert re.search(reason, line) and not list(folder.glob("*.weights")) and model.weight_bytes > 0


def test_mapped_weights_count_as_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards against a KV cache for which weights would leave memory: the system calls a file's pages available."""
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100 * MIB))
    memory = device_memory(CPU)
    arrays = packed_file_in(tmp_path, {}).arrays(SHAPES, fill)
    taken = 100 * MIB - memory.free()
    assert taken == (0 if packed_file._is_in_memory(os.open(tmp_path, os.O_RDONLY)) else 12 * MIB + 4096)
    del arrays
    assert memory.free() == 100 * MIB


def test_the_folder_is_a_text() -> None:
    """Guards a config that is printed, sent to another process, or compared."""
    with pytest.raises(ConfigError, match="weights_folder must be a text, not 5"):
        EngineConfig(weights_folder=5)  # type: ignore[arg-type]
