"""One ragged step as a picture: its tokens side by side, what each attends to, and the cache blocks it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from cbatch.cli.bench.recorder import ExampleStep, RecordedChunk, RunRecord
from cbatch.cli.bench.render.style import (
    BACKGROUND,
    CHUNK_COLOURS,
    EMPTY_SLOT,
    INK_ON_DARK,
    INK_ON_LIGHT,
    LEGEND,
    TEXT,
    WIDTH,
    axes_grid,
    new_figure,
)

MAX_CHUNKS = len(CHUNK_COLOURS)
RESERVED_PROMPTS = 3
"""Prompts that are always shown; the other places go to chunks in order."""

MAX_CELLS = 64
"""Cells that stand for the tokens of one prompt."""

LEFT, RIGHT = 2.1, 0.2
LINE, PROMPTS = 0.16, 1.6
"""Height in inches of a single token's line of the mask, and of all lines of prompts together."""
PALE = 0.35

BlockTable = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class DrawnChunk:
    """A chunk of the step and where it is drawn.

    cells: cells that stand for its tokens; fewer than tokens if there are many
    first: number of its first cell
    top:   of its lines in the mask, in inches
    line:  height of each of them, in inches
    left:  of its columns in the mask, in tokens
    """

    recorded: RecordedChunk
    table: BlockTable
    colour: str
    cells: int
    first: int
    top: float
    line: float
    left: float

    @property
    def height(self) -> float:
        return self.cells * self.line

    def visible_tokens(self, cell: int) -> float:
        """Tokens of this step that the last token of a cell attends to, itself included."""
        return self.recorded.tokens * (cell + 1) / self.cells


def choose_chunks(chunks: list[tuple[RecordedChunk, BlockTable]]) -> list[tuple[RecordedChunk, BlockTable]]:
    """As many chunks as can be told apart, in their order. Padding is left out, unless there is nothing else."""
    shown = [n for n, (chunk, _) in enumerate(chunks) if chunk.kind != "padding"] or list(range(len(chunks)))
    chosen = [n for n in shown if chunks[n][0].tokens > 1][:RESERVED_PROMPTS]
    chosen += [n for n in shown if n not in chosen][: MAX_CHUNKS - len(chosen)]
    return [chunks[n] for n in sorted(chosen)]


def lay_out(chunks: list[tuple[RecordedChunk, BlockTable]], block_size: int) -> tuple[list[DrawnChunk], float]:
    """The places of the chunks, and the width of the mask in tokens."""
    cells = [min(chunk.tokens, MAX_CELLS) for chunk, _ in chunks]
    prompt_line = PROMPTS / max(sum(count for count in cells if count > 1), 12)
    gap = 0.02 * sum(len(table) * block_size for _, table in chunks)
    drawn: list[DrawnChunk] = []
    top, left = 0.0, 0.0
    for n, ((chunk, table), colour) in enumerate(zip(chunks, CHUNK_COLOURS, strict=False)):
        line = LINE if cells[n] == 1 else prompt_line
        drawn.append(DrawnChunk(chunk, table, colour, cells[n], sum(cells[:n]), top, line, left))
        top += drawn[-1].height
        left += len(table) * block_size + gap
    return drawn, left - gap


def plot_step(record: RunRecord, example: ExampleStep) -> Figure:
    """One step of a record."""
    chunks = list(zip(record.steps[example.step].chunks, example.block_tables, strict=True))
    drawn, width = lay_out(choose_chunks(chunks), example.block_size)
    heights = [0.26, drawn[-1].top + drawn[-1].height, 0.26, 0.26]
    tokens = sum(chunk.tokens for chunk, _ in chunks)
    requests = len({chunk.request for chunk, _ in chunks})
    figure = new_figure(
        sum(heights) + 2.45,
        f"One step of the engine: {tokens} tokens of {requests} requests in one pass",
        _subtitle(drawn, requests),
    )
    hspace = 0.42 / (sum(heights) / len(heights))
    panels = axes_grid(figure, heights, left=LEFT, right=RIGHT, top=0.98, bottom=0.21, hspace=hspace)
    for axes in panels:
        axes.spines[:].set_visible(False)
        axes.set_xlim(0, width)
        axes.set_ylim(0.5, -0.5)
        axes.tick_params(left=False, bottom=False, labelbottom=False, labelleft=False)
    _draw_tokens(panels[0], drawn, width)
    _draw_mask(panels[1], drawn, width)
    _draw_blocks(panels[2], drawn, example.block_size, width)
    _draw_pool(panels[3], drawn, width, record.num_blocks)
    return figure


def _subtitle(drawn: list[DrawnChunk], requests: int) -> str:
    words = "A colour for each request. Full colour: computed in this step; pale: already in the KV cache."
    more = []
    if len(drawn) < requests:
        more.append(f"{len(drawn)} of {requests} requests are shown.")
    if any(chunk.cells < chunk.recorded.tokens for chunk in drawn):
        more.append("Long prompts are shortened.")
    return "\n".join([words, " ".join(more)]).strip()


def _draw_tokens(axes: Axes, drawn: list[DrawnChunk], width: float) -> None:
    """The step's tokens next to each other, as the model gets them."""
    axes.set_title("The model's input: the tokens of all requests side by side", pad=4)
    cell = width / sum(chunk.cells for chunk in drawn)
    edge: dict[str, Any] = {"edgecolor": BACKGROUND, "linewidth": 0.6} if cell / width > 0.008 else {}
    for chunk in drawn:
        left = chunk.first * cell
        lefts = [left + n * cell for n in range(chunk.cells)]
        axes.barh(0, cell, left=lefts, height=1, color=chunk.colour, **edge)
        if chunk.first:
            axes.plot([left] * 2, [-0.5, 0.5], color=BACKGROUND, linewidth=2.5, solid_capstyle="butt")
    _name(axes, 0, "tokens")


def _draw_mask(axes: Axes, drawn: list[DrawnChunk], width: float) -> None:
    """Each token against the tokens of its own sequence up to itself."""
    axes.set_title("Attention: each token (line) attends only to its own sequence (columns), up to itself", pad=4)
    bottom = drawn[-1].top + drawn[-1].height
    axes.barh(bottom / 2, width, height=bottom, color=EMPTY_SLOT)
    for chunk in drawn:
        middle = chunk.top + chunk.height / 2
        start, tokens = chunk.recorded.start, chunk.recorded.tokens
        axes.barh(middle, start, left=chunk.left, height=chunk.height, color=chunk.colour, alpha=PALE)
        visible = [max(chunk.visible_tokens(n), 0.004 * width) for n in range(chunk.cells)]
        own_left = chunk.left + start
        axes.stairs(
            [own_left + keys for keys in visible],
            [chunk.top + n * chunk.line for n in range(chunk.cells + 1)],
            baseline=own_left,
            orientation="horizontal",
            fill=True,
            color=chunk.colour,
            linewidth=0,
        )
        if chunk.first:
            axes.axhline(chunk.top, color=BACKGROUND, linewidth=1.2)
            axes.axvline(chunk.left - 0.01 * width, color=BACKGROUND, linewidth=2.5)
        places = f"token {start}" if tokens == 1 else f"tokens {start} to {start + tokens - 1}"
        _name(axes, middle, f"request {chunk.recorded.request}, {places}", chunk.colour)
    axes.set_ylim(bottom, 0)


def _draw_blocks(axes: Axes, drawn: list[DrawnChunk], block_size: int, width: float) -> None:
    """The blocks of each chunk under its columns, with their numbers; the last one may be partly empty."""
    has_numbers = _fit(max(block for chunk in drawn for block in chunk.table), block_size / width)
    axes.set_title(
        f"The cache blocks of {block_size} tokens that hold these columns{', with their numbers' * has_numbers}", pad=4
    )
    for chunk in drawn:
        lefts = [chunk.left + n * block_size for n in range(len(chunk.table))]
        start, tokens = chunk.left + chunk.recorded.start, chunk.recorded.tokens
        axes.barh([0] * len(lefts), block_size, left=lefts, height=1, color=EMPTY_SLOT)
        axes.barh(0, chunk.recorded.start, left=chunk.left, height=1, color=chunk.colour, alpha=PALE)
        axes.barh(0, max(tokens, 0.004 * width), left=start, height=1, color=chunk.colour)
        axes.barh([0] * len(lefts), block_size, left=lefts, height=1, fill=False, edgecolor=BACKGROUND, linewidth=1)
        for left, block in zip(lefts, chunk.table, strict=True):
            if has_numbers:
                old = min(max(start - left, 0), block_size)
                middle = left + (old if old >= block_size / 2 else old + block_size) / 2  # in the larger part
                _number(axes, middle, block, ink_on(chunk.colour) if start <= middle < start + tokens else TEXT)
    _name(axes, 0, "blocks")


def _draw_pool(axes: Axes, drawn: list[DrawnChunk], width: float, num_blocks: int) -> None:
    """The same blocks in their order in memory."""
    blocks = [block for chunk in drawn for block in chunk.table]
    first, last = min(blocks), max(blocks)
    axes.set_title(
        f"The same blocks in memory, {first:,} to {last:,} of {num_blocks:,}: a request takes whichever are free", pad=4
    )
    share = 1 / (last - first + 1)
    axes.barh(0, width, height=1, color=EMPTY_SLOT)
    edge: dict[str, Any] = {"edgecolor": BACKGROUND, "linewidth": 0.8} if share > 0.005 else {}
    has_numbers = _fit(last, share)
    for chunk in drawn:
        lefts = [(block - first) * share * width for block in chunk.table]
        cell = max(share, 0.002) * width
        axes.barh([0] * len(lefts), cell, left=lefts, height=1, color=chunk.colour, **edge)
        for left, block in zip(lefts, chunk.table, strict=True):
            if has_numbers:
                _number(axes, left + cell / 2, block, ink_on(chunk.colour))
    _name(axes, 0, "KV cache")


def _fit(largest: int, share: float) -> bool:
    """Whether numbers up to this one fit fields that take this share of the width."""
    return share * (WIDTH - LEFT - RIGHT) > 0.02 + 0.055 * len(str(largest))


def _number(axes: Axes, x: float, block: int, ink: str) -> None:
    axes.text(x, 0, str(block), size=6.5, ha="center", va="center", color=ink)


def ink_on(colour: str) -> str:
    """What can be read on a colour."""
    red, green, blue = (int(colour[n : n + 2], 16) / 255 for n in (1, 3, 5))
    return INK_ON_LIGHT if 0.2126 * red**2.2 + 0.7152 * green**2.2 + 0.0722 * blue**2.2 > 0.2 else INK_ON_DARK


def _name(axes: Axes, y: float, words: str, colour: str = "") -> None:
    """A label to the left of a line, with a square of the request's colour."""
    places: dict[str, Any] = {"xy": (0, y), "textcoords": "offset points", "ha": "right", "va": "center"}
    axes.annotate(words, xytext=(-18 if colour else -6, 0), size=8.5, color=TEXT, **places)
    if colour:
        axes.annotate("■", xytext=(-5, 0), size=11, color=colour, gid=f"{LEGEND}-{colour[1:]}", **places)
