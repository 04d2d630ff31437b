"""gpt-oss for Surogate."""
