"""Preference training: losses of answers, and the dataset types of these."""
