"""Model architectures for Surogate."""
