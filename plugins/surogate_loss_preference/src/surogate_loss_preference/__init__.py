"""Preference training: losses of pairs of answers, and the dataset type of such pairs."""
