"""Frozen weights in NF4 for Surogate."""
