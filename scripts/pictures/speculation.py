"""Drafts as a picture: the tokens that a few requests get in each step of a run, drafted or not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from cbatch.cli.bench.pictures import style
from cbatch.cli.bench.recorder import RecordedChunk, RecordedStep, RunRecord, count_drafts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MAX_STEPS, MAX_REQUESTS = 24, 6
"""Of the picture of drafts."""

NARROW = 5.6
"""Inches; narrower than other pictures, so that words can be read on a phone."""

OWN, ACCEPTED, REJECTED, PROMPT = "as without drafts", "accepted", "rejected", "prompt"
DRAFT_COLOURS = {
    OWN: style.KIND_COLOURS["decode"],
    ACCEPTED: style.KIND_COLOURS["prefill"],
    REJECTED: style.KIND_COLOURS["idle"],
    PROMPT: style.colour("#d0d7de", "#484f58"),
}
"""Blue is what requests got. All differ in lightness too."""


def typical_steps(steps: Sequence[RecordedStep]) -> range:
    """The numbers of MAX_STEPS consecutive steps whose share of accepted tokens is nearest to that of all steps.

    They have at least half as many drafted tokens as any others.
    """
    if len(steps) <= MAX_STEPS:
        return range(len(steps))
    of_steps = np.array([count_drafts([step]) for step in steps])
    drafted, accepted = (np.convolve(counts, np.ones(MAX_STEPS), "valid") for counts in of_steps.T)
    share = of_steps[:, 1].sum() / max(of_steps[:, 0].sum(), 1)
    distance = np.where(2 * drafted >= drafted.max(), abs(accepted / np.maximum(drafted, 1) - share), np.inf)
    first = int(np.lexsort((-drafted, distance))[0])
    return range(first, first + MAX_STEPS)


def tokens_shown(chunk: RecordedChunk) -> dict[str, int]:
    """How many tokens of each kind a chunk stands for, in the order in which they are stacked."""
    first = PROMPT if chunk.kind == "prefill" else OWN
    return {first: 1, ACCEPTED: chunk.accepted, REJECTED: chunk.drafted - chunk.accepted}


def plot_speculation(record: RunRecord) -> Figure:
    """A stretch of a run that has drafts, with the requests that have most of them."""
    shown = typical_steps(record.steps)
    chunks = [(n, chunk) for n in shown for chunk in record.steps[n].chunks if chunk.kind in ("prefill", "decode")]
    drafted = Counter[int]()
    for _, chunk in chunks:
        drafted[chunk.request] += chunk.drafted
    requests = sorted(request for request, _ in drafted.most_common(MAX_REQUESTS))
    most = max(1 + chunk.drafted for _, chunk in chunks)
    all_drafted, all_accepted = count_drafts(record.steps)
    figure = style.new_figure(
        (0.26 + 0.08 * most) * len(requests) + 0.6,
        "Drafts: several tokens of a request in one step",
        f"{all_accepted:,} of {all_drafted:,} drafted tokens of the run were accepted.",
        DRAFT_COLOURS,
    )
    figure.set_figwidth(NARROW)
    panels = figure.subplots(len(requests), squeeze=False, sharex=True)[:, 0]
    for axes, request in zip(panels, requests, strict=True):
        _draw_tokens(axes, [(n, chunk) for n, chunk in chunks if chunk.request == request])
        style.write(axes, f"request {request}", (0, 0.35), (-6, 0), xycoords="axes fraction", ha="right", size=9)
        axes.set(xlim=(shown.start - 0.6, shown.stop - 0.4), ylim=(0, most))
    panels[-1].spines["bottom"].set_visible(True)
    panels[-1].tick_params(bottom=True, labelbottom=True)
    panels[-1].set_xlabel("step")
    panels[0].set_title("tokens a step", loc="right", size=9)
    return figure


def _draw_tokens(axes: Axes, chunks: Sequence[tuple[int, RecordedChunk]]) -> None:
    """A column of tokens for each step of a request, and the mean of what it got in a step."""
    places: dict[str, list[tuple[int, int]]] = {kind: [] for kind in DRAFT_COLOURS}
    for step, chunk in chunks:
        below = 0
        for kind, count in tokens_shown(chunk).items():
            places[kind] += [(step, below + n) for n in range(count)]
            below += count
    for kind, found in places.items():
        steps, bottoms = [step for step, _ in found], [below + 0.08 for _, below in found]
        axes.bar(steps, 0.84, bottom=bottoms, width=0.8, color=DRAFT_COLOURS[kind], linewidth=0)
    axes.spines[:].set_visible(False)
    axes.tick_params(left=False, labelleft=False, bottom=False, labelbottom=False)
    axes.axhline(0, color=style.MUTED, linewidth=0.7)
    if places[OWN]:
        mean = f"{1 + len(places[ACCEPTED]) / len(places[OWN]):.1f}"
        style.write(axes, mean, (1, 0.35), (6, 0), xycoords="axes fraction", size=10)
