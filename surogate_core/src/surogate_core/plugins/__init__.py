"""Installed plugins: discovery, checks, registry."""
