"""Answers that are kept on disk, so that no batch computes them twice."""
