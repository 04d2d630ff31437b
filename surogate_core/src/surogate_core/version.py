"""The version of surogate-core, and of every package that is released with it."""

__version__ = "0.2.0"
