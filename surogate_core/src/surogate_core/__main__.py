"""`python -m surogate_core` is `python -m surogate`."""

from .cli import __main__  # noqa: F401 (it runs)
