"""Offloading of optimizer states, masters and weights for Surogate."""
