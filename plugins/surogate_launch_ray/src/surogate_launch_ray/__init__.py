"""Runs on a Ray cluster: a process on each node, started and watched from one place."""
