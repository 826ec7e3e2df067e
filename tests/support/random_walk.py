"""Random actions on small schedulers, quicker than hypothesis draws them; each repeatable from a seed and a number."""

from __future__ import annotations

import random

from tests.support.scheduler_simulation import SchedulerSimulation, SimulationSizes

ACTIONS = {
    "step": 60,
    "add": 16,
    "share": 14,
    "fork": 3,
    "urgent": 4,
    "evict": 1,
    "cancel": 5,
    "fail": 6,
    "nan": 2,
    "shrink": 1,
    "grow": 15,
    "limit": 4,
}
"""How often each of them is drawn."""
MOST_LIVE = 20


class RandomWalk:
    """One simulation, and the random actions on it."""

    def __init__(self, seed: int, number: int, *, recurrent: bool = False) -> None:
        """recurrent: of a model with recurrent layers"""
        self._random = random.Random(f"{seed}/{number}")
        below = self._random.random
        self._has_one_priority = below() < 0.3
        """If all requests have one priority and steps keep their size, preemption is bounded."""
        self._longest_suffix = self._random.choice((2, 3, 5, 16))
        self._most_tokens = self._random.choice((3, 10, 24))
        self.simulation = SchedulerSimulation(
            SimulationSizes(
                block_size=self._random.randint(1, 8),
                num_blocks=self._random.randint(2, 24),
                max_seqs=self._random.randint(1, 8),
                max_batch_tokens=self._random.randint(1, 32),
                prefix_cache=below() < 0.9,
                colliding=below() < 0.2,
                overlap=below() < 0.7,
                vocabulary=self._random.choice((3, 50)),
                **self._state_sizes(recurrent),
            )
        )

    def _state_sizes(self, recurrent: bool) -> dict[str, int]:
        if not recurrent:
            return {}
        return {"state_slots": self._random.randint(1, 16), "chunk_multiple": self._random.choice((1, 1, 2, 4, 6))}

    def run(self, actions: int) -> SchedulerSimulation:
        """Does so many random actions, then steps until all requests are done."""
        names, weights = list(ACTIONS), list(ACTIONS.values())
        for name in self._random.choices(names, weights, k=actions):
            self._act(name)
        if self._random.random() < 0.75:
            for _ in range(5):  # doubling 1 so often makes 32
                self.simulation.grow()
        self.simulation.drain()
        return self.simulation

    def _act(self, name: str) -> None:
        simulation, draw = self.simulation, self._random.randrange
        if self._has_one_priority and name in ("urgent", "shrink"):
            name = "add" if name == "urgent" else "step"
        if name == "step":
            simulation.step()
        elif name == "cancel":
            simulation.cancel(draw(MOST_LIVE))
        elif name == "fail":
            simulation.fail_step(
                garbage=draw(2) == 0, late=draw(2) == 0, shrink=draw(16) == 0 and not self._has_one_priority
            )
        elif name == "nan":
            simulation.step(broken=[draw(8)])
        elif name == "shrink":
            simulation.shrink(draw(1, simulation.scheduler.max_batch_tokens + 1))
        elif name == "grow":
            simulation.grow()
        elif name == "limit":
            simulation.limit_prefill(self._random.choice((None, 1, 2, 3, 8)))
        elif len(simulation.sequences) < MOST_LIVE:
            self._add(name)

    def _add(self, name: str) -> None:
        simulation, draw = self.simulation, self._random.randrange
        capacity = simulation.scheduler.pool.capacity
        priority = 1 if self._has_one_priority else draw(1, 4)
        if name == "evict":
            for _ in range(draw(1, 4)):
                simulation.add(self._suffix(capacity // 2 + 1, capacity), 1, priority)
            return
        start = 0 if name == "add" else draw(3 * self._longest_suffix)
        suffix = self._suffix(0, 3) if name == "fork" else self._suffix(1, min(self._longest_suffix, capacity))
        prompt = simulation.prompt(draw(MOST_LIVE), start, suffix, generated=name == "fork")
        stop_after = draw(1, self._most_tokens + 1) if draw(3) == 0 else None
        simulation.add(prompt, draw(1, self._most_tokens + 1), 0 if name == "urgent" else priority, stop_after)

    def _suffix(self, least: int, most: int) -> list[int]:
        return [self._random.randrange(3) for _ in range(self._random.randint(least, most))]
