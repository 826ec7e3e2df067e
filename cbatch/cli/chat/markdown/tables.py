"""Tables drawn with box characters."""

from __future__ import annotations

from dataclasses import dataclass

from cbatch.cli.chat.markdown.inline import inline_lines
from cbatch.cli.chat.markdown.markup import StyledLine, cells, wrap

MIN_COLUMN = 4
"""If columns would be narrower than this, cells stand below one another."""


@dataclass
class Table:
    """Cells in Markdown; the first row is the header. An alignment is left, right, center or empty."""

    rows: list[list[str]]
    alignments: list[str]

    def lines(self, width: int) -> list[StyledLine]:
        header, *body = self.rows
        laid_out = [[inline_lines(cell, "class:heading") for cell in header]]
        laid_out += [[inline_lines(cell) for cell in row] for row in body]
        available = width - 3 * (len(self.alignments) - 1)
        if available < MIN_COLUMN * len(self.alignments):
            return self._list(laid_out, width)
        natural = [max(1, *(cells(line) for row in laid_out for line in row[n])) for n in range(len(self.alignments))]
        widths = _shrink(natural, available)
        lines: list[StyledLine] = []
        for number, row in enumerate(laid_out):
            lines += self._row(row, widths)
            if number == 0:
                lines.append([("class:table", "─┼─".join("─" * size for size in widths))])
        return lines

    def _row(self, row: list[list[StyledLine]], widths: list[int]) -> list[StyledLine]:
        columns = [[part for line in cell for part in wrap(line, size)] for cell, size in zip(row, widths, strict=True)]
        lines = []
        for number in range(max(map(len, columns))):
            line: StyledLine = []
            for column, (cell, size) in enumerate(zip(columns, widths, strict=True)):
                part = cell[number] if number < len(cell) else []
                is_last = column == len(widths) - 1
                line += [*([("class:table", " │ ")] if column else []), *self._aligned(part, size, column, is_last)]
            lines.append(line)
        return lines

    def _aligned(self, part: StyledLine, size: int, column: int, is_last: bool) -> StyledLine:
        spare = max(size - cells(part), 0)
        alignment = self.alignments[column]
        left = {"right": spare, "center": spare // 2}.get(alignment, 0)
        right = 0 if is_last else spare - left
        return [*([("", " " * left)] if left else []), *part, *([("", " " * right)] if right else [])]

    def _list(self, laid_out: list[list[list[StyledLine]]], width: int) -> list[StyledLine]:
        header, *body = laid_out
        lines: list[StyledLine] = []
        empty: list[list[StyledLine]] = [[[]] for _ in header]
        for number, row in enumerate(body or [empty]):
            if number:
                lines.append([])
            for name, cell in zip(header, row, strict=True):
                first, *others = cell
                lines += wrap([*name[0], ("", ": "), *first], width)
                lines += [part for line in others for part in wrap(line, width)]
        return lines


def _shrink(natural: list[int], available: int) -> list[int]:
    """Widths that fit: the widest columns are cut to the same width, the others keep theirs."""
    if sum(natural) <= available:
        return natural
    left, count = available, len(natural)
    for size in sorted(natural):
        if size > left // count:
            break
        left, count = left - size, count - 1
    limit = left // count
    widths = [min(n, limit) for n in natural]
    spare = available - sum(widths)
    for number, size in enumerate(natural):
        if size > limit and spare > 0:
            widths[number] += 1
            spare -= 1
    return widths
