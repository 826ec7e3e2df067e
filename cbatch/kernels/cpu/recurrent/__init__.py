"""Layers with a state that goes from token to token."""
