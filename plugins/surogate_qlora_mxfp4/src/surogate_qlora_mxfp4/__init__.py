"""Frozen weights in MXFP4 for Surogate."""
