"""Phi models for Surogate."""
