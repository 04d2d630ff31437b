"""The BF16/FP32 precision recipe for Surogate."""
