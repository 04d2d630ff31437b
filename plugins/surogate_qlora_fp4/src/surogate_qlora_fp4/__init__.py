"""Frozen weights in NVFP4 for Surogate."""
