"""`python -m surogate_core.cli` runs `surogate`."""

from .app import main

main()
