"""From data files to the batches of a step: sources -> tokenize (cached) -> pack -> loader.

Nothing here imports torch; batches are numpy arrays.
"""
