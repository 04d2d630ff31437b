"""An optimizer, an op and a model for Surogate, by somebody else."""
