"""Fixtures of whole runs, to damage what they read and write."""

from end_to_end.conftest import here, workplace

__all__ = ["here", "workplace"]
