"""Mistral models for Surogate."""
