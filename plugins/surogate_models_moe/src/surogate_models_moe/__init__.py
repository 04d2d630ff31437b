"""Mixtures of experts for Surogate."""
