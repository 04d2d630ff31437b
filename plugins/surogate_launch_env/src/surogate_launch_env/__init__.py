"""Processes that torchrun, MPI or Slurm has started, for Surogate."""
