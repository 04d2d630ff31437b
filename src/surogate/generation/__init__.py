"""Text that a model writes: `surogate generate` and `chat`, and the samples of a run. Models run in transformers."""
