"""One ragged step as a picture: its tokens in one row, what each attends to, and the pages it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cbatch.cli.bench.recorder import RecordedChunk, RunRecord
from cbatch.cli.bench.render.style import (
    BACKGROUND,
    EMPTY_SLOT,
    ROW_COLOURS,
    TEXT,
    WIDTH,
    axes_grid,
    new_figure,
    with_style,
)

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_SEQUENCES = len(ROW_COLOURS)
PROMPTS_FIRST = 3
"""Prompts that are shown in any case, before single tokens are."""

MOST_CELLS = 64
"""That stand for the tokens of one prompt."""

LEFT, RIGHT = 1.75, 0.2
LINE, PROMPTS = 0.16, 1.6
"""Inches that a single token's line of the mask is high, and all lines of prompts together."""
PALE = 0.35


@dataclass(frozen=True, slots=True)
class Sequence:
    """A part of the step as it is drawn.

    cells: how many cells stand for its tokens; fewer than those where they are many
    first: number of its first cell
    top:   of its lines in the mask, in inches
    line:  height of each of them, in inches
    left:  of its columns in the mask, in tokens
    """

    chunk: RecordedChunk
    table: tuple[int, ...]
    colour: str
    cells: int
    first: int
    top: float
    line: float
    left: float

    @property
    def stop(self) -> int:
        return self.chunk.start + self.chunk.tokens

    @property
    def height(self) -> float:
        return self.cells * self.line

    def own(self, cell: int) -> float:
        """Tokens of this step that the last token of a cell sees, itself included."""
        return self.chunk.tokens * (cell + 1) / self.cells


def choose_chunks(chunks: list[tuple[RecordedChunk, tuple[int, ...]]]) -> list[tuple[RecordedChunk, tuple[int, ...]]]:
    """As many as can be told apart, in their order: some prompts in any case, padding only where all is."""
    rows = [n for n, (chunk, _) in enumerate(chunks) if chunk.kind != "padding"] or list(range(len(chunks)))
    prompts = [n for n in rows if chunks[n][0].tokens > 1]
    chosen = prompts[:PROMPTS_FIRST]
    chosen += [n for n in rows if n not in chosen][: MOST_SEQUENCES - len(chosen)]
    return [chunks[n] for n in sorted(chosen)]


def lay_out(chunks: list[tuple[RecordedChunk, tuple[int, ...]]], block_size: int) -> tuple[list[Sequence], float]:
    """Where everything is drawn, and how wide the mask is, in tokens."""
    cells = [min(chunk.tokens, MOST_CELLS) for chunk, _ in chunks]
    prompt_line = PROMPTS / max(sum(count for count in cells if count > 1), 12)
    gap = 0.02 * sum(len(table) * block_size for _, table in chunks)
    found: list[Sequence] = []
    top, left = 0.0, 0.0
    for n, ((chunk, table), colour) in enumerate(zip(chunks, ROW_COLOURS, strict=False)):
        line = LINE if cells[n] == 1 else prompt_line
        found.append(Sequence(chunk, table, colour, cells[n], sum(cells[:n]), top, line, left))
        top += found[-1].height
        left += len(table) * block_size + gap
    return found, left - gap


@with_style
def plot_step(record: RunRecord) -> Figure:
    """The step that the trace keeps as an example. Raises ValueError where it keeps none."""
    example = record.example
    if example is None:
        raise ValueError("The trace has no example of a step.")
    chunks = list(zip(record.steps[example.step].chunks, example.tables, strict=True))
    sequences, width = lay_out(choose_chunks(chunks), example.block_size)
    heights = [0.26, sequences[-1].top + sequences[-1].height, 0.26, 0.26]
    tokens = sum(chunk.tokens for chunk, _ in chunks)
    rows = len({chunk.row for chunk, _ in chunks})
    figure = new_figure(
        sum(heights) + 2.45,
        f"One step of the engine: {tokens} tokens of {rows} rows in one pass",
        _subtitle(sequences, rows),
    )
    hspace = 0.42 / (sum(heights) / len(heights))
    panels = axes_grid(figure, heights, left=LEFT, right=RIGHT, top=0.98, bottom=0.21, hspace=hspace)
    for axes in panels:
        axes.spines[:].set_visible(False)
        axes.set_xlim(0, width)
        axes.set_ylim(0.5, -0.5)
        axes.tick_params(left=False, bottom=False, labelbottom=False, labelleft=False)
    _draw_tokens(panels[0], sequences, width)
    _draw_mask(panels[1], sequences, width)
    _draw_pages(panels[2], sequences, example.block_size, width)
    _draw_pool(panels[3], sequences, width, record.num_blocks)
    return figure


def _subtitle(sequences: list[Sequence], rows: int) -> str:
    words = "A colour for each row; full: computed in this step, pale: in the KV cache before it."
    if len(sequences) < rows:
        words += f" {len(sequences)} of {rows} rows are shown."
    if any(sequence.cells < sequence.chunk.tokens for sequence in sequences):
        words += " Long prompts are cut short."
    return words


def _draw_tokens(axes: Axes, sequences: list[Sequence], width: float) -> None:
    """The step's tokens next to each other, as the model gets them."""
    axes.set_title("The input of the model: all tokens in one line, whatever row they belong to", pad=4)
    cell = width / sum(sequence.cells for sequence in sequences)
    edge: dict[str, Any] = {"edgecolor": BACKGROUND, "linewidth": 0.6} if cell / width > 0.008 else {}
    for sequence in sequences:
        left = sequence.first * cell
        lefts = [left + n * cell for n in range(sequence.cells)]
        axes.barh(0, cell, left=lefts, height=1, color=sequence.colour, **edge)
        if sequence.first:
            axes.plot([left] * 2, [-0.5, 0.5], color=BACKGROUND, linewidth=2.5, solid_capstyle="butt")
    _name(axes, 0, "tokens")


def _draw_mask(axes: Axes, sequences: list[Sequence], width: float) -> None:
    """Each token against the tokens of its own sequence up to itself."""
    axes.set_title("Attention: each token (lines) sees its own sequence (columns) up to itself, and no other", pad=4)
    bottom = sequences[-1].top + sequences[-1].height
    axes.barh(bottom / 2, width, height=bottom, color=EMPTY_SLOT)
    for sequence in sequences:
        chunk, line = sequence.chunk, sequence.line
        middle = sequence.top + sequence.height / 2
        axes.barh(middle, chunk.start, left=sequence.left, height=sequence.height, color=sequence.colour, alpha=PALE)
        own = [max(sequence.own(n), 0.004 * width) for n in range(sequence.cells)]
        start = sequence.left + chunk.start
        axes.stairs(
            [start + keys for keys in own],
            [sequence.top + n * line for n in range(sequence.cells + 1)],
            baseline=start,
            orientation="horizontal",
            fill=True,
            color=sequence.colour,
            linewidth=0,
        )
        if sequence.first:
            axes.axhline(sequence.top, color=BACKGROUND, linewidth=1.2)
            axes.axvline(sequence.left - 0.01 * width, color=BACKGROUND, linewidth=2.5)
        places = f"token {chunk.start}" if chunk.tokens == 1 else f"tokens {chunk.start} to {sequence.stop - 1}"
        _name(axes, middle, f"row {chunk.row}, {places}")
    axes.set_ylim(bottom, 0)


def _draw_pages(axes: Axes, sequences: list[Sequence], block_size: int, width: float) -> None:
    """The blocks of each sequence under its columns, with their numbers; the last one may have room left."""
    digits = max(len(str(block)) for sequence in sequences for block in sequence.table)
    has_numbers = block_size / width * (WIDTH - LEFT - RIGHT) > 0.03 + 0.055 * digits
    axes.set_title(
        f"The pages of {block_size} tokens that hold these columns{', with their numbers' * has_numbers}", pad=4
    )
    for sequence in sequences:
        lefts = [sequence.left + n * block_size for n in range(len(sequence.table))]
        start, tokens = sequence.left + sequence.chunk.start, sequence.chunk.tokens
        axes.barh([0] * len(lefts), block_size, left=lefts, height=1, color=EMPTY_SLOT)
        axes.barh(0, sequence.chunk.start, left=sequence.left, height=1, color=sequence.colour, alpha=PALE)
        axes.barh(0, max(tokens, 0.004 * width), left=start, height=1, color=sequence.colour)
        axes.barh([0] * len(lefts), block_size, left=lefts, height=1, fill=False, edgecolor=BACKGROUND, linewidth=1)
        for left, block in zip(lefts, sequence.table, strict=True):
            if has_numbers:
                middle = left + block_size / 2
                ink = BACKGROUND if start <= middle < start + tokens else TEXT
                axes.text(middle, 0, str(block), size=6.5, ha="center", va="center", color=ink)
    _name(axes, 0, "pages")


def _draw_pool(axes: Axes, sequences: list[Sequence], width: float, num_blocks: int) -> None:
    """The same blocks in the order in which they lie in memory."""
    last = max(block for sequence in sequences for block in sequence.table)
    axes.set_title(f"The same pages where they lie in memory: the first {last + 1:,} of {num_blocks:,}", pad=4)
    page = width / (last + 1)
    axes.barh(0, width, height=1, color=EMPTY_SLOT)
    edge: dict[str, Any] = {"edgecolor": BACKGROUND, "linewidth": 0.8} if last < 200 else {}
    for sequence in sequences:
        lefts = [block * page for block in sequence.table]
        axes.barh([0] * len(lefts), max(page, 0.002 * width), left=lefts, height=1, color=sequence.colour, **edge)
    _name(axes, 0, "KV cache")


def _name(axes: Axes, y: float, words: str) -> None:
    """What a line is, left of it."""
    axes.annotate(words, (0, y), (-6, 0), textcoords="offset points", ha="right", va="center", size=8.5, color=TEXT)
