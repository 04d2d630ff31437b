"""Surogate's core: programs, memory plans, plugins, the training loop. Imports no plugin and, here, no torch."""

__version__ = "0.2.0"
