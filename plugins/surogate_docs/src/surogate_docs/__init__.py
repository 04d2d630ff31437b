"""`surogate docs`: the pages of the documentation, which the wheel has in `docs/`."""
