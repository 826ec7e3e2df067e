"""Pictures of the steps of a run: a lane for each slot, the slots' shares of time, and drafts of a few requests."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np

from cbatch.cli.bench import timeline, units
from cbatch.cli.bench.pictures import style
from cbatch.cli.bench.recorder import TOKEN_KINDS, RecordedChunk, RecordedStep, RunRecord, count_drafts

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BINS = 100
"""Points in time across the picture of shares; each is a mean over its stretch."""

MOST_TIMES = 4.0
"""The picture of shares ends with the longest run that takes at most this many times as long as the shortest."""


def plot_timeline(records: Mapping[str, RunRecord]) -> Figure:
    """A lane for each slot, with all strategies on the same time scale."""
    slots = [record.slots for record in records.values()]
    lane = min(0.2, 5 / max(sum(slots), 1))
    figure = style.new_figure(
        sum(slots) * lane + 0.4 * len(slots) + 0.4,
        "Static batches wait for their slowest request; continuous batching admits the next one"
        if len(records) > 1
        else "What each slot did",
        "One lane for each slot; the numbers are those of the requests.",
        style.KINDS,
    )
    panels = figure.subplots(len(slots), squeeze=False, sharex=True, height_ratios=slots)[:, 0]
    end = max(record.elapsed_s for record in records.values()) or 1.0
    for axes, (title, record) in zip(panels, records.items(), strict=True):
        _draw_lanes(axes, record, end, labels=lane > 0.12)
        axes.set_title(f"{title}: {record.elapsed_s:.2f} s", weight="bold", pad=5)
        axes.set_title(timeline.share_line(record), loc="right", color=style.MUTED, pad=5)
    panels[-1].set_xlabel("seconds")
    return figure


def _draw_lanes(axes: Axes, record: RunRecord, end: float, *, labels: bool) -> None:
    found = timeline.slot_intervals(record)
    axes.barh(range(record.slots), record.elapsed_s, color=style.EMPTY_SLOT)
    axes.barh(
        [one.slot for one in found],
        [one.seconds for one in found],
        left=[one.start for one in found],
        color=[style.KIND_COLOURS[one.kind] for one in found],
        linewidth=0,
    )
    entries = [one for one in found if one.is_entry]
    middles, lefts = np.array([one.slot for one in entries], float), [one.start for one in entries]
    axes.vlines(lefts, middles - 0.4, middles + 0.4, color=style.BACKGROUND, linewidth=1.5 if labels else 0.4)
    decodes = sorted((one for one in found if one.kind == "decode"), key=lambda one: one.seconds)
    for request, longest in {one.request: one for one in decodes}.items():
        if labels and longest.seconds > 0.006 * end * (1 + len(str(request))):
            axes.text(longest.start + 0.004 * end, longest.slot, str(request), size=7, va="center")
    axes.set(xlim=(0, end), ylim=(record.slots - 0.5, -0.5), yticks=[0, record.slots - 1] if record.slots > 1 else [0])
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)
    axes.set_ylabel("slot", labelpad=3)


def visible_end(seconds: Sequence[float]) -> float:
    """Where the time axis ends: much longer runs are cut, for they would leave no space for the others.

    The two shortest runs are never cut.
    """
    ordered = sorted(seconds) or [0.0]
    return max([*ordered[:2], *(time for time in ordered if time <= MOST_TIMES * ordered[0])]) or 1.0


def plot_utilisation(records: Mapping[str, RunRecord], others: Mapping[str, float]) -> Figure:
    """The share of busy slots over time, a panel for each record.

    others: seconds by name, of runs whose slots are not known
    """
    times = {title: record.elapsed_s for title, record in records.items()} | dict(others)
    heights = [0.62 if title in records else 0.16 for title in times]
    figure = style.new_figure(
        sum(heights) + 0.34 * len(heights) + 0.3,
        "How much of the engine does useful work",
        "Share of the slots that compute, over time; blue is useful work.",
        style.KINDS | ({"only the time is known": style.PEER} if others else {}),
    )
    end = visible_end(list(times.values()))
    panels = figure.subplots(len(times), squeeze=False, sharex=True, height_ratios=heights)[:, 0]
    for axes, (title, seconds) in zip(panels, times.items(), strict=True):
        words = units.duration(seconds)
        if (record := records.get(title)) is not None:
            _draw_shares(axes, record, end)
            words = f"useful {timeline.whole_percents(timeline.time_shares(record))['useful']}% of {words}"
        else:
            axes.barh(0.5, min(seconds, end), height=1, color=style.PEER)
            axes.set_yticks([])
        if seconds > end:
            words += f", of which {units.duration(end)} are shown"
        axes.set_title(title, weight="bold" if title == style.SUBJECT else "normal", pad=4)
        axes.set_title(words, loc="right", pad=4)
        axes.set(xlim=(0, end), ylim=(0, 1))
    panels[-1].set_xlabel("seconds")
    return figure


def _draw_shares(axes: Axes, record: RunRecord, end: float) -> None:
    shown_s = min(record.elapsed_s, end)
    axes.barh(0.5, shown_s, height=1, color=style.EMPTY_SLOT)
    edges = np.linspace(0, shown_s or 1.0, BINS + 1)
    times, floor = [0.0, *(time for step in record.steps for time in (step.start, step.end))], np.zeros(BINS)
    for kind, seconds in zip(TOKEN_KINDS, timeline.slot_seconds(record).T, strict=True):
        so_far = np.repeat([0.0, *np.cumsum(seconds)], 2)[:-1]  # it grows during steps, not between them
        share = np.diff(np.interp(edges, times, so_far)) / edges[1] / record.slots
        if share.any():
            colour = style.KIND_COLOURS[kind]
            axes.stairs(floor + share, edges, baseline=floor, fill=True, color=colour, linewidth=0)
        floor = floor + share
    axes.set_yticks([0, 0.5, 1], ["0", "50%", "100%"])
    axes.grid(axis="y")


MAX_STEPS, MAX_REQUESTS = 24, 6
"""Of the picture of drafts."""

NARROW = 5.6
"""Inches; narrower than other pictures, so that words can be read on a phone."""

OWN, ACCEPTED, REJECTED, PROMPT = "as without drafts", "accepted", "rejected", "prompt"
DRAFT_COLOURS = {
    OWN: style.KIND_COLOURS["decode"],
    ACCEPTED: style.KIND_COLOURS["prefill"],
    REJECTED: style.KIND_COLOURS["idle"],
    PROMPT: style.PALE_GREY,
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
        width=NARROW,
    )
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
