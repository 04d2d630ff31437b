"""Gemma models for Surogate."""
