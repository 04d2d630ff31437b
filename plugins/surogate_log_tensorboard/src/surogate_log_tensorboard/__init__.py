"""TensorBoard for Surogate."""
