"""`python -m surogate_core.cli` is `python -m surogate.cli`."""

from ..moved import program

program("surogate.cli.__main__", "surogate_core.cli")
