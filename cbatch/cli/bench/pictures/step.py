"""One ragged step as a picture: its tokens side by side, what each attends to, and the cache blocks it reads."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cbatch.cli.bench.pictures.style import (
    BACKGROUND,
    CHUNK_COLOURS,
    EMPTY_SLOT,
    INK_ON_DARK,
    INK_ON_LIGHT,
    TEXT,
    WIDTH,
    new_figure,
)
from cbatch.cli.bench.recorder import ExampleStep, RecordedChunk, RunRecord

RESERVED_PROMPTS = 3
"""Prompts that are always shown; the other places go to chunks in order."""

MAX_CELLS = 64
"""Cells that stand for the tokens of one prompt."""

LINE, PROMPTS, ROW = 0.16, 1.6, 0.26
"""Inches of a single token's line of the mask, of all lines of prompts together, and of the other panels."""

PALE = 0.35

BlockTable = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DrawnChunk:
    """A chunk of the step and where it is drawn.

    cells: cells that stand for its tokens; fewer than tokens if there are many
    top:   of its lines in the mask, in inches
    line:  height of each of them, in inches
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

    def visible_tokens(self, cell: int) -> float:
        """Tokens of this step that the last token of a cell attends to, itself included."""
        return self.recorded.tokens * (cell + 1) / self.cells


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
    """One step of a record."""
    chunks = list(zip(record.steps[example.step].chunks, example.block_tables, strict=True))
    drawn, width = lay_out(choose_chunks(chunks), example.block_size)
    heights = [ROW, drawn[-1].bottom, ROW, ROW]
    tokens, requests = sum(chunk.tokens for chunk, _ in chunks), len({chunk.request for chunk, _ in chunks})
    note = "A colour for each request. Full colour: computed in this step; pale: already in the KV cache."
    if len(drawn) < requests:
        note += f" {len(drawn)} of {requests} requests are shown."
    figure = new_figure(
        sum(heights) + 1.35, f"One step of the engine: {tokens} tokens of {requests} requests in one pass", note, {}
    )
    panels = figure.subplots(4, height_ratios=heights)
    for axes in panels:
        axes.spines[:].set_visible(False)
        axes.set(xlim=(0, width), ylim=(0.5, -0.5), xticks=[], yticks=[])
        axes.tick_params(left=False, labelcolor=TEXT)
    _draw_tokens(panels[0], drawn, width)
    _draw_mask(panels[1], drawn, width)
    _draw_blocks(panels[2], drawn, example.block_size, width)
    _draw_pool(panels[3], drawn, width, record.num_blocks)
    return figure


def _draw_tokens(axes: Axes, drawn: list[DrawnChunk], width: float) -> None:
    axes.set_title("The model's input: the tokens of all requests side by side", pad=4)
    cell = width / sum(chunk.cells for chunk in drawn)
    first = 0
    for chunk in drawn:
        lefts = [(first + n) * cell for n in range(chunk.cells)]
        has_edges = cell / width > 0.008
        axes.barh(0, cell, 1, lefts, color=chunk.colour, edgecolor=BACKGROUND, linewidth=0.6 if has_edges else 0)
        if first:
            axes.axvline(lefts[0], color=BACKGROUND, linewidth=2.5)
        first += chunk.cells
    axes.set_yticks([0], ["tokens"])


def _draw_mask(axes: Axes, drawn: list[DrawnChunk], width: float) -> None:
    """Each token against the tokens of its own sequence up to itself."""
    axes.set_title("Attention: each token (line) attends only to its own sequence (columns), up to itself", pad=4)
    bottom = drawn[-1].bottom
    axes.barh(bottom / 2, width, bottom, color=EMPTY_SLOT)
    names = []
    for chunk in drawn:
        start, tokens = chunk.recorded.start, chunk.recorded.tokens
        own_left, height = chunk.left + start, chunk.bottom - chunk.top
        axes.barh(chunk.top + height / 2, start, height, chunk.left, color=chunk.colour, alpha=PALE)
        lefts = [own_left + max(chunk.visible_tokens(n), 0.004 * width) for n in range(chunk.cells)]
        tops = [chunk.top + n * chunk.line for n in range(chunk.cells + 1)]
        axes.stairs(
            lefts, tops, baseline=own_left, orientation="horizontal", fill=True, color=chunk.colour, linewidth=0
        )
        if chunk.top:
            axes.axhline(chunk.top, color=BACKGROUND, linewidth=1.2)
            axes.axvline(chunk.left - 0.01 * width, color=BACKGROUND, linewidth=2.5)
        places = f"token {start}" if tokens == 1 else f"tokens {start} to {start + tokens - 1}"
        names.append(f"request {chunk.recorded.request}, {places}")
    axes.set_ylim(bottom, 0)
    axes.set_yticks([(chunk.top + chunk.bottom) / 2 for chunk in drawn], names)
    axes.tick_params(axis="y", pad=12)
    for chunk in drawn:
        place = (0, (chunk.top + chunk.bottom) / 2)
        axes.annotate(
            "■", place, (-2, 0), textcoords="offset points", ha="right", va="center", size=11, color=chunk.colour
        )


def _draw_blocks(axes: Axes, drawn: list[DrawnChunk], block_size: int, width: float) -> None:
    """The blocks of each chunk under its columns, with their numbers; the last one may be partly empty."""
    has_numbers = _fit([block for chunk in drawn for block in chunk.table], block_size / width)
    axes.set_title(
        f"The cache blocks of {block_size} tokens that hold these columns{', with their numbers' * has_numbers}", pad=4
    )
    for chunk in drawn:
        lefts = [chunk.left + n * block_size for n in range(len(chunk.table))]
        start, tokens = chunk.left + chunk.recorded.start, chunk.recorded.tokens
        axes.barh(0, block_size * len(lefts), 1, chunk.left, color=EMPTY_SLOT)
        axes.barh(0, chunk.recorded.start, 1, chunk.left, color=chunk.colour, alpha=PALE)
        axes.barh(0, max(tokens, 0.004 * width), 1, start, color=chunk.colour)
        axes.barh(0, block_size, 1, lefts, fill=False, edgecolor=BACKGROUND, linewidth=1)
        for left, block in zip(lefts, chunk.table, strict=True) if has_numbers else ():
            old = min(max(start - left, 0), block_size)
            middle = left + (old if old >= block_size / 2 else old + block_size) / 2  # in the larger part
            _number(axes, middle, block, ink_on(chunk.colour) if start <= middle < start + tokens else TEXT)
    axes.set_yticks([0], ["blocks"])


def _draw_pool(axes: Axes, drawn: list[DrawnChunk], width: float, num_blocks: int) -> None:
    """The same blocks in their order in memory."""
    blocks = [block for chunk in drawn for block in chunk.table]
    first, last = min(blocks), max(blocks)
    axes.set_title(
        f"The same blocks in memory, {first:,} to {last:,} of {num_blocks:,}: a request takes whichever are free", pad=4
    )
    share = 1 / (last - first + 1)
    axes.barh(0, width, 1, color=EMPTY_SLOT)
    for chunk in drawn:
        lefts = [(block - first) * share * width for block in chunk.table]
        cell, edge = max(share, 0.002) * width, 0.8 if share > 0.005 else 0
        axes.barh(0, cell, 1, lefts, color=chunk.colour, edgecolor=BACKGROUND, linewidth=edge)
        for left, block in zip(lefts, chunk.table, strict=True) if _fit(blocks, share) else ():
            _number(axes, left + cell / 2, block, ink_on(chunk.colour))
    axes.set_yticks([0], ["KV cache"])


def _fit(blocks: Sequence[int], share: float) -> bool:
    """Whether the numbers of these blocks fit fields that take this share of the width."""
    return share * (WIDTH - 2.3) > 0.02 + 0.055 * len(str(max(blocks)))


def _number(axes: Axes, x: float, block: int, ink: str) -> None:
    axes.text(x, 0, str(block), size=6.5, ha="center", va="center", color=ink)


def ink_on(colour: str) -> str:
    """The colour of text that can be read on a colour."""
    red, green, blue = (int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5))
    return INK_ON_LIGHT if 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 > 0.2 else INK_ON_DARK
