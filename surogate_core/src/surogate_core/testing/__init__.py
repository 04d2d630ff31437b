"""Test tools for authors of plugins."""
