"""The benchmark beside other engines: all get the same work, the table is honest, and cbatch runs through all of it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType
from safetensors.torch import save_file

from cbatch.kernels.formats import INT4
from scripts.benchmarks.harness import main, parse
from scripts.benchmarks.peers import grid, llama_cpp_peer, process
from scripts.benchmarks.peers.cbatch_peer import make_engine
from scripts.benchmarks.peers.process import PeerProcess, call, disturbance
from scripts.benchmarks.peers.work import (
    PeerJob,
    PeerWork,
    make_equal_work,
    make_model,
    make_work,
)
from scripts.benchmarks.peers.worker import PEERS, Worker
from scripts.benchmarks.shapes import PEER_SHAPES
from tests.support.gguf_files import gguf_model, write_model

SMALL = PeerWork([[5, 6, 7], [8] * 20, [9, 10]], [4, 9, 1])


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> PeerJob:
    folder = tmp_path_factory.mktemp("peers")
    make_model(folder / "model", PEER_SHAPES["tiny"])
    return PeerJob(str(folder), "float32", threads=1, max_seqs=2, max_batch_tokens=16, work=SMALL)


def test_the_work_is_the_same_everywhere() -> None:
    """Guards figures that are compared over time: the default work has the same requests on every machine."""
    work = make_work(32, 7, PEER_SHAPES["135m"]["vocab_size"])
    assert work == make_work(32, 7, PEER_SHAPES["135m"]["vocab_size"])
    assert (work.prompt_tokens, work.output_tokens) == (3708, 2049)


def test_prompts_share_what_they_should() -> None:
    """Guards shared prefixes, and the prefix cache: warm-ups and later turns have no token of the work in its place."""
    vocabulary = PEER_SHAPES["tiny"]["vocab_size"]
    work = make_equal_work(3, prompt=40, output=2, seed=1, vocabulary=vocabulary, common=20)
    assert [len(prompt) for prompt in work.prompts] == [40] * 3 and work.lengths == [2] * 3
    assert [len(prompt) for prompt in work.distinct_prompts] == [40, 20, 20]
    turns = [work, work.warm_up(), *(work.turn(number) for number in range(1, 32))]
    for tokens in zip(*(turn.prompts[0] for turn in turns), strict=True):
        assert len(set(tokens)) == len(turns) and max(tokens) < vocabulary
    assert all(len({tuple(prompt[:20]) for prompt in turn.prompts}) == 1 for turn in turns)


def test_less_work_is_no_work(job: PeerJob) -> None:
    """Guards against a speed for less work than was asked for, and figures of a busy machine."""
    peer = PeerProcess("cbatch", [job], {"cbatch": "/no/such/python"})
    error = peer._error_of({"outputs": [[1] * 4, [2] * 8, [3] * 2]}, ("work", 0, 1))
    assert error == "not comparable: request 2 got 8 of 9 tokens"
    assert peer._error_of({"outputs": [[1] * 4, [2] * 9, [3]]}, ("work", 0, 1)) == ""
    assert disturbance(0.05) == "" and disturbance(1.26) == "Disturbed: something else took 1.3 cores."


@pytest.fixture
def requests_arrive_together() -> Iterator[None]:
    """Keeps an engine's thread from its first step until the thread that submits the requests waits for them."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1)
    yield
    sys.setswitchinterval(before)


@pytest.mark.slow
@pytest.mark.usefixtures("requests_arrive_together")
def test_systems_do_the_work(job: PeerJob) -> None:
    """Guards the systems that are always installed: all give the same tokens as cbatch."""
    replies = {}
    for name in PEERS:
        if name.startswith(("cbatch", "transformers")):
            worker = Worker(PEERS[name], [job])
            worker.load()
            replies[name] = worker.work("0", "1")
    assert {str(reply["outputs"]) for reply in replies.values()} == {str(replies["cbatch"]["outputs"])}
    assert list(map(len, replies["cbatch"]["outputs"])) == SMALL.lengths
    assert all(reply["seconds"] > 0 for reply in replies.values())
    steps = {name: reply["steps"] for name, reply in replies.items()}
    assert steps == {"cbatch": 10, "transformers-one": 14, "transformers-static": 9, "transformers-cb": None}


def test_weights_for_llama_cpp(tmp_path: Path) -> None:
    """Guards the weights for llama.cpp: bits are read unchanged, and rotary heads are put in its order."""
    weight = torch.randn(2 * 8, 6).to(torch.bfloat16)
    save_file({"layer.q_proj.weight": weight, "norm": weight[0].clone()}, tmp_path / "model.safetensors")
    bits = dict(llama_cpp_peer.read_bfloat16(tmp_path / "model.safetensors"))
    assert (bits["norm"] == weight[0].view(torch.uint16).numpy()).all()
    config = {"head_dim": 8, "hidden_size": 6}
    ordered = llama_cpp_peer.reorder("layer.q_proj.weight", bits["layer.q_proj.weight"], config)
    heads = weight.view(torch.uint16).unflatten(0, (2, 2, 4))  # heads, halves, pairs
    assert (ordered == heads.transpose(1, 2).reshape(16, 6).numpy()).all()
    assert llama_cpp_peer.reorder("layer.o_proj.weight", bits["norm"], config) is bits["norm"]


def test_names_of_systems(capsys: pytest.CaptureFixture[str]) -> None:
    """Guards the command line: `transformers` means all three, `families` many models, and errors are sentences."""
    options = parse(["grid", "--peers", "openvino,transformers,openvino", "--python", "openvino=~/bin/python"])
    assert options.peers == ["openvino", "transformers-one", "transformers-static", "transformers-cb"]
    assert options.python == [("openvino", str(Path.home() / "bin/python"))]
    assert parse(["grid", "--shape", "tiny,families"]).shape[:2] == ["tiny", "phi3"]
    with pytest.raises(SystemExit):
        parse(["grid", "--peers=vllm"])
    assert "there is no 'vllm'" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["--work-dir", "--results", "--json"])
def test_a_place_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str], option: str) -> None:
    """Guards hours of rounds against a wrong path: it is refused before the first round."""
    (tmp_path / "file").touch()
    options = ["--work-dir", str(tmp_path / "work"), "--results", str(tmp_path / "grid.json")]
    assert main(["grid", *options, option, str(tmp_path / "file" / "inside"), "--shape", "tiny"]) == 2
    assert "Not a directory" in capsys.readouterr().err and not (tmp_path / "work" / "tiny" / "model").exists()


@pytest.mark.slow
def test_a_package_that_is_missing(job: PeerJob, tmp_path: Path) -> None:
    """Guards the line about a missing package: it says what is missing, and how to install it."""
    bare = tmp_path / "python"
    bare.write_text(f'#!/bin/sh\nexec {sys.executable} -S -E "$@"\n')  # finds nothing that is installed
    bare.chmod(0o755)
    sentence = "not installed (No module named 'llama_cpp'): pip install llama-cpp-python gguf"
    assert call("llama.cpp", "prepare", [job], {"llama.cpp": str(bare)}) == {"error": sentence}


class Here(PeerProcess):
    """A system that works in this process, or whose interpreter cannot be run."""

    def __init__(self, name: str, jobs: Sequence[PeerJob], interpreters: dict[str, str]) -> None:
        self.worker = Worker(PEERS[name], jobs)
        super().__init__(name, jobs, {name: "/nowhere"})

    def ask(self, *task: object) -> dict[str, Any]:
        if self._name != "cbatch":
            return super().ask(*task)
        name, *arguments = map(str, task)
        return self.worker.tasks[name](*arguments) | {"cores_elsewhere": 0.0}


@pytest.mark.slow
def test_a_grid_goes_on_where_it_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Guards hours of measuring: what is in the file is not measured again, and its medians make the table."""
    monkeypatch.setitem(grid.KINDS, "mixed", grid.Kind(lambda vocabulary: SMALL, 2))
    monkeypatch.setattr(process, "PeerProcess", Here)
    monkeypatch.setattr(grid, "PeerProcess", Here)
    file = tmp_path / "grid.json"
    options = ["--shape", "tiny", "--kind", "mixed", "--weights", "f32", "--peers", "cbatch,openvino"]
    options += ["--threads", "1", "--work-dir", str(tmp_path), "--results", str(file)]

    def measured(*more: str) -> dict[str, Any]:
        assert main(["grid", *options, *more]) == 0
        return json.loads(file.read_text())

    first = measured("--rounds", "1")
    [floor] = first["floors"]["tiny/f32/mixed"]
    assert floor["seconds"] == max(floor["weights_s"], floor["compute_s"]) + floor["cache_s"] > 0
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grid, "PeerProcess", None)
        assert measured("--rounds", "1") == first
    seconds = measured("--rounds", "2")["runs"]["tiny/f32/mixed"]["cbatch"]
    assert len(seconds) == 2 and seconds[:1] == first["runs"]["tiny/f32/mixed"]["cbatch"]
    measured("--table", "--markdown")
    shown = capsys.readouterr().out.splitlines()
    assert "tiny/f32/openvino: failed: /nowhere cannot be run: No such file or directory" in shown
    [line] = [line for line in shown[-6:] if "| mixed" in line.replace("  ", "")]
    assert f" {SMALL.output_tokens / (sum(seconds) / 2):,.0f} |" in line


def test_cbatch_reads_the_file_of_its_rival(tmp_path: Path) -> None:
    """Guards figures beside llama.cpp on one file: cbatch does not quantize the model in its own way."""
    job = PeerJob(str(tmp_path), "bfloat16", 1, 2, 16, SMALL, "int8", reads_gguf=True)
    make_model(job.model, PEER_SHAPES["tiny"])
    write_model(job.gguf, gguf_model("llama"), GGMLQuantizationType.Q4_0)
    with make_engine(job) as engine:
        assert INT4 in engine.model.formats


def test_floors_have_the_steps_of_the_work() -> None:
    """Guards shares of the floor: one request takes a step for each token, however many would fit into it."""
    floor = {"weights_s": 14 / 256, "compute_s": 3.0, "cache_s": 0.5, "seconds": 3.5, "rows_per_step": 256.0}
    floor |= {"in_experts": 0.0, "chosen": 1.0}
    alone, together = (grid.with_steps_of(floor, SMALL, seats) for seats in (1, 3))
    assert (alone["weights_s"], alone["seconds"], alone["rows_per_step"]) == (14, 14.5, 1)
    assert together["weights_s"] == 9 == together["seconds"] - 0.5, "the longest output has nine tokens"
    few = grid.with_steps_of(floor | {"in_experts": 0.75, "chosen": 0.5}, SMALL, 1)
    assert few["weights_s"] == 14 * (1 - 0.75 / 2), "one token reads half of the experts"
