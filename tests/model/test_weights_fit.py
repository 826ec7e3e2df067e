"""Weights are counted before they are made: those that a config asks for, those in the files, and free memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig

from cbatch.base.errors import ModelError
from cbatch.model.config import read_model_config
from cbatch.model.cpu import CpuModel
from cbatch.model.device_map import DeviceMap
from cbatch.model.hf.network import check_weights_fit
from cbatch.model.load_plan import DEMO_MODEL, LoadPlan
from cbatch.model.tensor_files import Tensors
from cbatch.runtime import memory

CPU = torch.device("cpu")


def check(folder: Path, device_map: DeviceMap | None = None, **sizes: Any) -> None:
    config = AutoConfig.from_pretrained(folder)
    for name, size in sizes.items():
        setattr(config, name, size)
    check_weights_fit(LoadPlan(str(folder), device_map=device_map), config, torch.float32)


@pytest.fixture
def little_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leaves 100 KiB of the host's memory."""
    monkeypatch.setattr(memory, "free_cgroup_bytes", lambda: 100 * 1024)


@pytest.mark.parametrize(
    ("sizes", "sentence"),
    [
        ({"num_hidden_layers": 1000}, r"asks for 1000 layers, and the files of .* hold 21 tensors\.$"),
        ({"vocab_size": 10**6}, r"asks for weights of 366\.3 MiB, and the files of .* hold 234\.2 KiB\.$"),
        ({"hidden_size": 2**40}, r"asks for weights of [\d,.]+ TiB, and the files of .* hold 234\.2 KiB\.$"),
    ],
)
def test_weights_that_the_files_do_not_hold(model_folder: Path, sizes: dict[str, int], sentence: str) -> None:
    """Guards memory and minutes: transformers makes weights that are missing at random, then says that they are."""
    with pytest.raises(ModelError, match=sentence):
        check(model_folder, **sizes)


@pytest.mark.usefixtures("little_memory")
def test_weights_that_memory_does_not_hold(model_folder: Path) -> None:
    """Guards a machine against a model that is larger than it, on both paths: the sentence has both figures."""
    with pytest.raises(ModelError, match=r"^The weights of .* need 234\.2 KiB, and 100\.0 KiB are free on cpu"):
        check(model_folder)
    check(model_folder, DeviceMap(CPU, {}))  # spread over devices
    with pytest.raises(ModelError, match=r"^The weights need [\d.]+ MiB, and 100\.0 KiB are free on cpu"):
        CpuModel(read_model_config(DEMO_MODEL), Tensors(DEMO_MODEL), torch.float32)


def test_the_limit_of_a_container_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards containers: they are killed at their own limit, while the machine has memory left."""
    group = tmp_path / "outer" / "inner"
    group.mkdir(parents=True)
    (tmp_path / "cgroup").write_text("1:name=systemd:/x\n0::/outer/inner\n")
    monkeypatch.setattr(memory, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(memory, "_ROOT", tmp_path)
    unlimited = memory._free_host_bytes()
    for folder, most in ((group, "max"), (group.parent, "5000")):
        (folder / "memory.max").write_text(f"{most}\n")
        (folder / "memory.current").write_text("3000\n")
        (folder / "memory.stat").write_text("anon 1500\nfile 1500\n")
    assert memory.free_cgroup_bytes() == 5000 - 3000 + 1500 == memory._free_host_bytes() < unlimited
    (group.parent / "memory.max").write_text("max")
    assert memory.free_cgroup_bytes() > 2**60
