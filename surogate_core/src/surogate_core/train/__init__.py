"""A training run: setup, loop, outputs."""
