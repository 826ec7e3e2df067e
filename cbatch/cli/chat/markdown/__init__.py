"""Markdown as lines of a terminal, laid out while it streams."""
