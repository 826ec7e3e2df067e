"""Models with random damage of every kind: one sentence, or an outcome for every row; see `tests.support.model_fuzzer`.

`python -m scripts.stress.damaged_models` runs more of them, with other limits for chat templates.
"""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from cbatch.model.load_plan import LoadPlan
from cbatch.model.loader import NoFastPath, load_fast_model
from tests.support.model_fuzzer.judge import Outcome, violations
from tests.support.model_fuzzer.kinds import FORMATS, WholeModels
from tests.support.model_fuzzer.runs import limited_runs
from tests.support.model_fuzzer.weight_damage import Folder

pytestmark = [
    pytest.mark.slow,
    pytest.mark.kernels,
    pytest.mark.skipif(sys.platform != "linux", reason="Limits and peaks of memory are those of Linux."),
]

SEED = 0
PLAIN = {
    "config": 520, "generation": 240, "tokenizer": 160, "tokenizer settings": 160, "template": 120, "index": 120,
    "weights": 120, "files": 120, "lora": 60, "packed weights": 60,
}  # fmt: skip
OTHERS = {**dict.fromkeys(FORMATS, 30), "gguf": 140}
"""How many of each area; 2,000 in all. Some that need processes of their own take longer."""

ALL = [pytest.param(PLAIN, part, 3, marks=pytest.mark.exhaustive, id=f"plain {part}") for part in range(3)]
ALL.append(pytest.param(OTHERS, 0, 1, marks=pytest.mark.exhaustive, id="others"))


@pytest.mark.parametrize(("counts", "first", "step"), [(PLAIN | OTHERS, 0, 59), *ALL], ids=lambda _: "some")
def test_damaged_models(counts: dict[str, int], first: int, step: int, tmp_path: Path) -> None:
    """Guards what nobody thought of: a hang, a traceback, a panic, a control character, or a gibibyte of memory."""
    codes, found = [], []
    with limited_runs(tmp_path, tuple(counts), child_seconds=0.2) as runs:
        for area, count in counts.items():
            for number in range(first, count, step):
                judged = runs.judge(area, SEED, number)
                codes.append(judged.outcome.code)
                if judged.violations:
                    found.append(f"{judged}: {judged.violations}")
    assert not found, "\n".join(found[:20])
    assert len(codes) / 5 < codes.count(2) < len(codes) * 0.95  # some damage matters, and some does not


def test_weights_that_are_no_numbers(tmp_path: Path) -> None:
    """Guards matrices of types that torch cannot join: it was another error, which ended the command with 3."""
    path = WholeModels(tmp_path).path("plain")
    folder = Folder.read(path)
    for name, kind in (("gate", "U64"), ("up", "F8_E8M0")):
        size = 64 * 64 * (8 if kind == "U64" else 1)
        folder.put(f"model.layers.0.mlp.{name}_proj.weight", kind, [64, 64], bytes(size))
    for name, content in folder.files().items():
        (path / name).write_bytes(content)
    with pytest.raises(NoFastPath, match=r"gate_proj\.weight is uint64|up_proj\.weight is float8_e8m0fnu"):
        load_fast_model(LoadPlan(str(path)))


GOOD = b'{"index": 0, "text": "a"}\n{"index": 1, "error": {"code": "invalid_row", "message": "no"}}\n'


@pytest.mark.parametrize(
    ("outcome", "expected"),
    [
        (Outcome(1, GOOD, b"", 0.1, 0.1, 1), None),
        (Outcome(2, b"", b"cbatch: It is damaged.\n", 0.1, 0.1, 1), None),
        (Outcome(None, b"", b"", 20.0, 0.1, 1), "did not end"),
        (Outcome(0, GOOD, b"", 21.0, 0.1, 1), "it took 21.0 s"),
        (Outcome(1, GOOD, b"", 0.1, 0.1, 2**31), "it took 2048 MiB"),
        (Outcome(3, b"", b"cbatch: KeyError('x')\n", 0.1, 0.1, 1), "it ended with 3"),
        (Outcome(2, b"", b"", 0.1, 0.1, 1), "without a sentence"),
        (Outcome(2, b"", b"cbatch: " + b"x" * 2000, 0.1, 0.1, 1), "more than some sentences"),
        (Outcome(2, b"", b"\xff", 0.1, 0.1, 1), "not UTF-8"),
        (Outcome(2, b"", b"cbatch: \x1b[31m.\n", 0.1, 0.1, 1), "control character"),
        (Outcome(2, b"", b"Traceback (most recent call last):\n", 0.1, 0.1, 1), "'Traceback'"),
        (Outcome(1, GOOD, b"thread '<unnamed>' panicked at x.rs\n", 0.1, 0.1, 1), "thread"),
        (Outcome(1, GOOD, b"loading: 5%\n", 0.1, 0.1, 1), "not its own"),
        (Outcome(1, GOOD[:30], b"", 0.1, 0.1, 1), "not JSON"),
        (Outcome(0, GOOD, b"", 0.1, 0.1, 1), "1 rows are errors"),
        (Outcome(0, GOOD[:26], b"", 0.1, 0.1, 1), "it gave the rows [0]"),
        (Outcome(1, GOOD.replace(b"no", b"\x07"), b"", 0.1, 0.1, 1), "in its output"),
    ],
)
def test_the_judge(outcome: Outcome, expected: str | None) -> None:
    """Guards the rules: each thing that a run may not do is noticed, and nothing else is."""
    found = violations(outcome, rows=2)
    assert (not found) if expected is None else any(expected in violation for violation in found), found
