"""LoRA for Surogate."""
