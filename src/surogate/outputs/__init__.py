"""The files that a run leaves in `output_dir`, and their checks."""
