"""`python -m surogate` is the command `surogate`: torchrun starts modules."""

from .cli import __main__  # noqa: F401 (it runs)
