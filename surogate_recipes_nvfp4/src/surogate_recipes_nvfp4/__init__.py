"""The NVFP4 precision recipe for Surogate."""
