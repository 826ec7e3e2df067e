"""Ends of texts that grow, and what they may turn out to be."""

from __future__ import annotations


def overlap(text: str, whole: str) -> int:
    """Length of the longest end of `text` that is a beginning of `whole`, short of all of it."""
    return next((n for n in range(min(len(whole) - 1, len(text)), 0, -1) if text.endswith(whole[:n])), 0)
