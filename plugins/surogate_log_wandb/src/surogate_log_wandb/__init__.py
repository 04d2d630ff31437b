"""Weights & Biases for Surogate."""
