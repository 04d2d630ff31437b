"""Reports of a run: metrics file, console, picture, summary."""
