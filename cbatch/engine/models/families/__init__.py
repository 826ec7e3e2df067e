"""The families whose models have a program: one declaration each, in the order of their kin."""

from cbatch.engine.models.families import llama as llama
