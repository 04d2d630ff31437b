"""Torch references of the standard ops. Kernels are tested against them, and the CPU executor runs them.

They are written for clarity, not speed.
"""
