"""Training: setup, loop, result."""
