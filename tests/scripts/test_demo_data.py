"""Training dialogues and held-out set of the demo model are disjoint, and reproducible from their seeds."""

from __future__ import annotations

from scripts.demo import data


def test_the_same_seed_gives_the_same_dialogues() -> None:
    """Guards the reproduction of a training run and of the score table."""
    first, again = (list(data.training_dialogues(5, 50)) for _ in range(2))
    assert first == again != list(data.training_dialogues(6, 50))
    assert data.held_out(per_skill=5) == data.held_out(per_skill=5)


def test_training_holds_nothing_of_the_test() -> None:
    """Guards the scores: the trainer keeps no dialogue with a held-out operand, word, name or question."""
    cases = data.held_out() + data.own_wording()
    overlap = data.Overlap(cases)
    kept = [dialogue for dialogue in data.training_dialogues(11, 2000) if not overlap.found(dialogue)]
    assert len(kept) > 1980, "the generator avoids the test set by itself, but for rare accidents"
    asked = {turn.user for dialogue in kept for turn in dialogue.turns}
    assert not asked & {case.messages[-1]["content"] for case in cases if len(case.messages) == 1}
