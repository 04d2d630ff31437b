"""AdamW with 8-bit states for Surogate."""
