"""The timeline as a picture: what each slot did, static batches above continuous batching."""

from __future__ import annotations

from collections.abc import Mapping

from matplotlib.axes import Axes
from matplotlib.collections import PolyCollection
from matplotlib.figure import Figure

from cbatch.cli.bench.recorder import RunRecord
from cbatch.cli.bench.render import style, timeline
from cbatch.cli.bench.render.timeline import Interval

TITLE = "Static batches wait for their slowest request; continuous batching admits the next one"


def plot_timeline(records: Mapping[str, RunRecord]) -> Figure:
    """A lane for each slot, with all strategies on the same time scale."""
    slots = [record.slots for record in records.values()]
    lane = min(0.2, 5 / max(sum(slots), 1))
    height = 1.45 + sum(slots) * lane + 0.38 * len(slots)
    figure = style.new_figure(
        height,
        TITLE if len(records) > 1 else "What each slot did",
        "One lane for each slot; the numbers are those of the requests.",
    )
    style.add_legend(figure)
    hspace = 0.38 * len(slots) / max(sum(slots) * lane, 0.1)
    panels = style.axes_grid(figure, slots, left=0.6, top=1.1, bottom=0.45, hspace=hspace)
    end = max(record.elapsed_s for record in records.values()) or 1.0
    for axes, (title, record) in zip(panels, records.items(), strict=True):
        _draw_lanes(axes, record, end, labels=lane > 0.12)
        axes.set_title(f"{title}: {record.elapsed_s:.2f} s", weight="bold", pad=5)
        axes.set_title(timeline.share_line(record), loc="right", color=style.MUTED, pad=5)
    panels[-1].set_xlabel("seconds")
    return figure


def _draw_lanes(axes: Axes, record: RunRecord, end: float, *, labels: bool) -> None:
    found = timeline.slot_intervals(record)
    axes.barh(range(record.slots), record.elapsed_s, height=0.8, color=style.EMPTY_SLOT)
    for kind in timeline.KINDS:
        boxes = [_box(interval) for interval in found if interval.kind == kind]
        axes.add_collection(PolyCollection(boxes, facecolors=style.KIND_COLOURS[kind], linewidths=0), autolim=False)
    entries = [interval for interval in found if interval.is_entry]
    starts, slots = [interval.start for interval in entries], [interval.slot for interval in entries]
    tops, bottoms = [slot - 0.4 for slot in slots], [slot + 0.4 for slot in slots]
    axes.vlines(starts, tops, bottoms, color=style.BACKGROUND, linewidth=1.5 if labels else 0.4)
    longest: dict[int, Interval] = {}
    for interval in found:
        if interval.kind == "decode":
            before = longest.get(interval.request, interval)
            longest[interval.request] = max(before, interval, key=lambda one: one.seconds)
    for request, interval in longest.items():
        if labels and interval.seconds > 0.006 * end * (1 + len(str(request))):
            axes.text(interval.start + 0.004 * end, interval.slot, str(request), size=7, va="center", color=style.TEXT)
    axes.set_ylim(record.slots - 0.5, -0.5)
    axes.set_xlim(0, end)
    axes.spines["left"].set_visible(False)
    axes.tick_params(left=False)
    axes.set_yticks([0, record.slots - 1] if record.slots > 1 else [0])
    axes.set_ylabel("slot", labelpad=3)


def _box(interval: Interval) -> list[tuple[float, float]]:
    top, bottom = interval.slot - 0.4, interval.slot + 0.4
    return [(interval.start, top), (interval.end, top), (interval.end, bottom), (interval.start, bottom)]
