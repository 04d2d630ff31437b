"""`python -m surogate_core` is the command `surogate`: torchrun starts modules."""

from .cli.app import main

main()
