"""Muse models for Surogate."""
