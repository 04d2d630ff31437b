"""Frozen weights in blockwise FP8, and models in FP8, for Surogate."""
