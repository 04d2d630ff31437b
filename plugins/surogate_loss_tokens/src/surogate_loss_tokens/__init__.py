"""Losses of tokens, and the op that gives log-probabilities of labels to other losses."""
