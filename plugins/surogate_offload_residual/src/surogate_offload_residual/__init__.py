"""Offloading of the residual stream for Surogate."""
