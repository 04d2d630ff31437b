"""Checkpoints and Hugging Face files: folders, manifests, training states, resuming."""
