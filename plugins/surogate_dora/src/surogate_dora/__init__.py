"""DoRA for Surogate."""
