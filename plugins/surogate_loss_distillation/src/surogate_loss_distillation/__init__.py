"""Distillation: KL divergence to the cached top-k probabilities of a teacher, beside cross-entropy."""
