"""The fixtures of whole runs, for damage to what they read and write."""

from end_to_end.conftest import here, workplace

__all__ = ["here", "workplace"]
