"""The command `surogate verify`: compares a run's model and recipe with transformers before the run."""
