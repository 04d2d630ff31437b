"""What a run leaves in `output_dir`, and the checks of it."""
