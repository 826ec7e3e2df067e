"""One ragged step as a picture: its tokens side by side, what each attends to, and the cache blocks it reads."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

from cbatch.cli.bench.pictures import style
from cbatch.cli.bench.recorder import RecordedChunk, RunRecord, RunRecorder
from cbatch.cli.bench.strategies import run_continuous
from cbatch.cli.bench.workload import Workload
from cbatch.engine.stats import StepRecord

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

RESERVED_PROMPTS = 3
"""Prompts that are always shown; the other places go to chunks in order."""

MAX_CELLS = 64
"""Cells that stand for the tokens of one prompt."""

LINE, PROMPTS, ROW = 0.16, 1.6, 0.26
"""Inches of a single token's line of the mask, of all lines of prompts together, and of the other panels."""

CHUNK_COLOURS = (
    style.colour("#332288", "#a99cf0"),
    style.colour("#ddaa33", "#ddaa34"),
    style.colour("#117733", "#6fd08c"),
    style.colour("#cc6677", "#f08a98"),
    style.colour("#88ccee", "#88ccef"),
    style.colour("#882255", "#d06ba6"),
    style.colour("#999933", "#b5b545"),
    style.colour("#44aa99", "#36b3a0"),
)
"""Colours that the colour-blind can tell apart: Paul Tol's muted scheme, https://personal.sron.nl/~pault/."""

INK_ON_DARK, INK_ON_LIGHT = style.colour("#fdfdfe", "#0d1118"), style.colour("#1a1d21", "#0d1119")
"""Text in a field of one of CHUNK_COLOURS."""

PALE = 0.35

BlockTable = tuple[int, ...]


class ExampleStep(NamedTuple):
    """The step to draw: its number, and the ids of the KV cache blocks up to the end of each of its chunks."""

    step: int
    block_size: int
    block_tables: tuple[BlockTable, ...]


MOST_BLOCKS = 60
"""Blocks whose numbers can be read in the picture of a step."""


def example_score(chunks: Sequence[tuple[int, int]], tables: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """How well a step serves as a picture; higher is better.

    chunks: start and length of each, without drafts
    tables: the blocks that each of them reads

    Best are steps that mix prompts and single tokens, then those in which the blocks of half the requests do not follow
    each other, then those with few enough to be read, then those that continue a prompt, then those with about seven
    chunks, and then those with few tokens.
    """
    prompts = [start for start, tokens in chunks if tokens > 1]
    is_mixed = 0 < len(prompts) < len(chunks)
    scattered = sum(any(after != before + 1 for before, after in pairwise(table)) for table in tables)
    return (
        is_mixed,
        is_mixed and 2 * scattered >= len(tables),
        is_mixed and sum(map(len, tables)) <= MOST_BLOCKS,
        is_mixed and any(prompts),
        -abs(len(chunks) - 7),
        -sum(tokens for _, tokens in chunks),
    )


class StepWatcher:
    """Runs the work in continuous batches, and keeps the step that serves best as a picture."""

    def __init__(self) -> None:
        self.example: ExampleStep | None = None
        self._best_score: tuple[int, ...] = ()

    def run(self, recorder: RunRecorder, work: Workload, slots: int) -> None:
        """As strategies of a bench do."""
        engine = recorder.engine
        record_step, limits = engine.on_step, engine.limits

        def on_step(step: StepRecord) -> None:
            """Keeps blocks of the step before it ends, when finished requests free theirs."""
            chunks = step.scheduled.chunks
            tables = tuple(tuple(chunk.sequence.blocks[: limits.blocks_for(chunk.stop)]) for chunk in chunks)
            score = example_score([(chunk.start, chunk.num_tokens - len(chunk.draft)) for chunk in chunks], tables)
            if score > self._best_score:
                self._best_score = score
                self.example = ExampleStep(len(recorder.record.steps), limits.block_size, tables)
            if record_step is not None:
                record_step(step)

        engine.on_step = on_step
        run_continuous(recorder, work, slots)


class DrawnChunk(NamedTuple):
    """A chunk of the step and where it is drawn.

    cells: cells that stand for its tokens; fewer than tokens if there are many
    top, line: of its cells in the mask and the height of each of them, in inches
    left:  of its columns in the mask, in tokens
    """

    recorded: RecordedChunk
    table: BlockTable
    colour: str
    cells: int
    top: float
    line: float
    left: float

    @property
    def bottom(self) -> float:
        return self.top + self.cells * self.line


def choose_chunks(chunks: list[tuple[RecordedChunk, BlockTable]]) -> list[tuple[RecordedChunk, BlockTable]]:
    """As many chunks as can be told apart, in their order. Padding is left out, unless there is nothing else."""
    shown = [n for n, (chunk, _) in enumerate(chunks) if chunk.kind != "padding"] or list(range(len(chunks)))
    chosen = [n for n in shown if chunks[n][0].tokens > 1][:RESERVED_PROMPTS]
    chosen += [n for n in shown if n not in chosen][: len(CHUNK_COLOURS) - len(chosen)]
    return [chunks[n] for n in sorted(chosen)]


def lay_out(chunks: list[tuple[RecordedChunk, BlockTable]], block_size: int) -> tuple[list[DrawnChunk], float]:
    """The places of the chunks, and the width of the mask in tokens."""
    cells = [min(chunk.tokens, MAX_CELLS) for chunk, _ in chunks]
    prompt_line = PROMPTS / max(sum(count for count in cells if count > 1), 12)
    gap = 0.02 * sum(len(table) * block_size for _, table in chunks)
    drawn: list[DrawnChunk] = []
    top = left = 0.0
    for (chunk, table), colour, count in zip(chunks, CHUNK_COLOURS, cells, strict=False):
        drawn.append(DrawnChunk(chunk, table, colour, count, top, LINE if count == 1 else prompt_line, left))
        top = drawn[-1].bottom
        left += len(table) * block_size + gap
    return drawn, left - gap


def plot_step(record: RunRecord, example: ExampleStep) -> Figure:
    chunks, size = list(zip(record.steps[example.step].chunks, example.block_tables, strict=True)), example.block_size
    drawn, width = lay_out(choose_chunks(chunks), size)
    heights = [ROW, drawn[-1].bottom, ROW, ROW]
    tokens, requests = sum(chunk.tokens for chunk, _ in chunks), len({chunk.request for chunk, _ in chunks})
    note = "A colour for each request. Full colour: computed in this step; pale: already in the KV cache."
    if len(drawn) < requests:
        note += f" {len(drawn)} of {requests} requests are shown."
    figure = style.new_figure(
        sum(heights) + 1.35, f"One step of the engine: {tokens} tokens of {requests} requests in one pass", note, {}
    )
    blocks = [block for one in drawn for block in one.table]
    has_numbers = _fit(blocks, size / width)
    titles = (
        "The model's input: the tokens of all requests side by side",
        "Attention: each token (line) attends only to its own sequence (columns), up to itself",
        f"The cache blocks of {size} tokens that hold these columns{', with their numbers' * has_numbers}",
        f"The same blocks in memory, {min(blocks):,} to {max(blocks):,} of {record.num_blocks:,}: "
        "a request takes whichever are free",
    )
    panels = figure.subplots(4, height_ratios=heights)
    for axes, title, name in zip(panels, titles, ("tokens", "", "blocks", "KV cache"), strict=True):
        axes.spines[:].set_visible(False)
        axes.set(xlim=(0, width), ylim=(0.5, -0.5), xticks=[])
        axes.set_yticks([0] if name else [], [name] if name else [])
        axes.tick_params(left=False, labelcolor=style.TEXT)
        axes.set_title(title, pad=4)
    _draw_mask(panels[1], drawn, width)
    panels[3].barh(0, width, 1, color=style.EMPTY_SLOT)
    cell, first = width / sum(one.cells for one in drawn), 0
    for one in drawn:
        _draw_tokens(panels[0], one, cell, first, 0.6 if cell / width > 0.008 else 0)
        _draw_blocks(panels[2], one, size, width, has_numbers=has_numbers)
        _draw_pool(panels[3], one, blocks, width)
        first += one.cells
    return figure


def _draw_tokens(axes: Axes, drawn: DrawnChunk, cell: float, first: int, edge: float) -> None:
    lefts = [(first + n) * cell for n in range(drawn.cells)]
    axes.barh(0, cell, 1, lefts, color=drawn.colour, edgecolor=style.BACKGROUND, linewidth=edge)
    if first:
        axes.axvline(lefts[0], color=style.BACKGROUND, linewidth=2.5)


def _draw_mask(axes: Axes, drawn: list[DrawnChunk], width: float) -> None:
    """Each token against the tokens of its own sequence up to itself."""
    bottom, names = drawn[-1].bottom, []
    middles = [(one.top + one.bottom) / 2 for one in drawn]
    axes.barh(bottom / 2, width, bottom, color=style.EMPTY_SLOT)
    for one, middle in zip(drawn, middles, strict=True):
        start, tokens = one.recorded.start, one.recorded.tokens
        own_left = one.left + start
        axes.barh(middle, start, one.bottom - one.top, one.left, color=one.colour, alpha=PALE)
        lefts = [own_left + max(tokens * (n + 1) / one.cells, 0.004 * width) for n in range(one.cells)]
        tops = [one.top + n * one.line for n in range(one.cells + 1)]
        axes.stairs(lefts, tops, baseline=own_left, orientation="horizontal", fill=True, color=one.colour, linewidth=0)
        if one.top:
            axes.axhline(one.top, color=style.BACKGROUND, linewidth=1.2)
            axes.axvline(one.left - 0.01 * width, color=style.BACKGROUND, linewidth=2.5)
        places = f"token {start}" if tokens == 1 else f"tokens {start} to {start + tokens - 1}"
        names.append(f"request {one.recorded.request}, {places}")
    axes.set_ylim(bottom, 0)
    axes.set_yticks(middles, names)
    axes.tick_params(axis="y", pad=12)
    for one, middle in zip(drawn, middles, strict=True):
        style.write(axes, "■", (0, middle), (-2, 0), ha="right", size=11, color=one.colour)


def _draw_blocks(axes: Axes, drawn: DrawnChunk, size: int, width: float, *, has_numbers: bool) -> None:
    """The blocks of a chunk under its columns; the last one may be partly empty."""
    lefts = [drawn.left + n * size for n in range(len(drawn.table))]
    start, tokens = drawn.left + drawn.recorded.start, drawn.recorded.tokens
    axes.barh(0, size * len(lefts), 1, drawn.left, color=style.EMPTY_SLOT)
    axes.barh(0, drawn.recorded.start, 1, drawn.left, color=drawn.colour, alpha=PALE)
    axes.barh(0, max(tokens, 0.004 * width), 1, start, color=drawn.colour)
    axes.barh(0, size, 1, lefts, fill=False, edgecolor=style.BACKGROUND, linewidth=1)
    for left, block in zip(lefts, drawn.table, strict=True) if has_numbers else ():
        old = min(max(start - left, 0), size)
        middle = left + (old if old >= size / 2 else old + size) / 2  # in the larger part
        _number(axes, middle, block, ink_on(drawn.colour) if start <= middle < start + tokens else style.TEXT)


def _draw_pool(axes: Axes, drawn: DrawnChunk, blocks: Sequence[int], width: float) -> None:
    """The same blocks in their order in memory."""
    first, share = min(blocks), 1 / (max(blocks) - min(blocks) + 1)
    lefts = [(block - first) * share * width for block in drawn.table]
    cell, edge = max(share, 0.002) * width, 0.8 if share > 0.005 else 0
    axes.barh(0, cell, 1, lefts, color=drawn.colour, edgecolor=style.BACKGROUND, linewidth=edge)
    for left, block in zip(lefts, drawn.table, strict=True) if _fit(blocks, share) else ():
        _number(axes, left + cell / 2, block, ink_on(drawn.colour))


def _fit(blocks: Sequence[int], share: float) -> bool:
    """Whether the numbers of these blocks fit fields that take this share of the width."""
    return share * (style.WIDTH - 2.3) > 0.02 + 0.055 * len(str(max(blocks)))


def _number(axes: Axes, x: float, block: int, ink: str) -> None:
    axes.text(x, 0, str(block), size=6.5, ha="center", va="center", color=ink)


def ink_on(colour: str) -> str:
    """The colour of text that can be read on a colour."""
    red, green, blue = (int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5))
    is_light = 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 > 0.2
    return INK_ON_LIGHT if is_light else INK_ON_DARK
