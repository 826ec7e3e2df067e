"""Finds the name that a misspelt one was meant to be."""

from __future__ import annotations

from collections.abc import Iterable, Sequence


def similar_name(name: str, known: Iterable[str]) -> str | None:
    """The first of the known names, in alphabetical order, that is one edit away; None if there is none."""
    return next((other for other in sorted(known) if one_edit_apart(name, other)), None)


def shortened(name: str) -> set[str]:
    """The name, and what is left of it without one of its letters.

    Names that are one edit apart have one of these in common, so most others are told from them by a look into a set.
    """
    return {name, *(name[:place] + name[place + 1 :] for place in range(len(name)))}


def one_edit_apart(a: Sequence[str], b: Sequence[str]) -> bool:
    """Whether one insertion, deletion, replacement or swap of neighbours makes a of b (optimal string alignment)."""
    if abs(len(a) - len(b)) > 1 or a == b:
        return False
    first = next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
    rest_a, rest_b = a[first:], b[first:]
    if len(a) != len(b):
        return rest_a[1:] == rest_b or rest_a == rest_b[1:]
    swapped = rest_a[:2] == rest_b[:2][::-1] and rest_a[2:] == rest_b[2:]
    return rest_a[1:] == rest_b[1:] or swapped
