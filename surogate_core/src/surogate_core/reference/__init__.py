"""What every standard op means, in plain torch: the oracle for kernels and the executor on a CPU. Slow on purpose."""
