"""The bundled model answers what it was trained to answer; training can be repeated, and saw nothing of the test."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import cbatch
from cbatch import Engine, EngineConfig, SamplingParams
from scripts.demo import data

DEMO = Path(cbatch.__file__).parent / "demo"
PROMPTS = Path(__file__).parents[2] / "scripts" / "prompts.jsonl"


@pytest.mark.slow
def test_the_main_job_of_the_readme(tmp_path: Path) -> None:
    """Guards the first command that anyone runs: exact answers that end by themselves, and one notice."""
    command = Path(sys.executable).with_name("cbatch")
    out = tmp_path / "out.jsonl"
    done = subprocess.run([command, "run", PROMPTS, "-o", out], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == len(PROMPTS.read_text().splitlines())
    exact = [row for row in rows if "expected" in row.get("extra", {})]
    assert len(exact) >= 20
    assert [(row["id"], row["text"]) for row in exact] == [(row["id"], row["extra"]["expected"]) for row in exact]
    assert {row["finish_reason"] for row in rows} == {"stop"}
    lengths = [row["usage"]["completion_tokens"] for row in rows]
    assert min(lengths) < 8 and max(lengths) > 60
    assert sum("demo model" in line for line in done.stderr.splitlines()) == 1


def test_the_demo_model_is_small() -> None:
    """Guards the size of the package."""
    assert sum(path.stat().st_size for path in DEMO.iterdir()) < 15e6


def test_demo_answers_equal_generate() -> None:
    """Guards real weights and a real tokenizer: greedy float32 text is what `generate` gives."""
    engine = Engine(EngineConfig(dtype="float32", device="cpu", max_batch_tokens=16, max_seqs=8))
    rows = [json.loads(line) for line in PROMPTS.read_text().splitlines()][:4]
    prompts = [engine.encode(row["prompt"] if "prompt" in row else {"messages": row["messages"]}) for row in rows]
    outputs = engine.generate(prompts, SamplingParams(max_tokens=30))
    network = engine.loaded.network
    network.set_attn_implementation("sdpa")
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt])
        full = network.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=30, do_sample=False)
        assert output.token_ids == full[0, len(prompt) :].tolist()


def test_the_same_seed_gives_the_same_dialogues() -> None:
    """Guards the reproduction of a training run and of the score table."""
    first, again = (list(data.training_dialogues(5, 50)) for _ in range(2))
    assert first == again != list(data.training_dialogues(6, 50))
    assert data.held_out(per_skill=5) == data.held_out(per_skill=5)


def test_training_holds_nothing_of_the_test() -> None:
    """Guards the scores: the trainer keeps no dialogue with a held-out operand, word, name or question."""
    cases = data.held_out() + data.own_wording()
    overlap = data.Overlap(cases)
    kept = [dialogue for dialogue in data.training_dialogues(11, 1000) if not overlap.found(dialogue)]
    assert len(kept) > 990, "the generator avoids the test set by itself, but for rare accidents"
    asked = {turn.user for dialogue in kept for turn in dialogue.turns}
    assert not asked & {case.messages[-1]["content"] for case in cases if len(case.messages) == 1}
