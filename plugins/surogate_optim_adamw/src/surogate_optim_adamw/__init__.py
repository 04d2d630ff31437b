"""AdamW for Surogate."""
