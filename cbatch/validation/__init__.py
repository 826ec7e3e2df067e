"""Whether an answer is good: JSON schemas, patterns, commands and functions that check its text."""
