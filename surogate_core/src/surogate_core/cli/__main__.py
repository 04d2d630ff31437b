"""`python -m surogate_core.cli` is `surogate`."""

from .app import main

main()
