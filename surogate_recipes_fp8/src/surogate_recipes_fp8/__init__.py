"""The FP8-hybrid precision recipe for Surogate."""
