"""`python -m surogate_core` is `python -m surogate`."""

from .moved import program

program("surogate.__main__", "surogate_core")
