"""Frozen weights in blockwise FP8 for Surogate."""
