"""Models that transformers computes: the adapter, what is checked at load, and weights on several devices."""
