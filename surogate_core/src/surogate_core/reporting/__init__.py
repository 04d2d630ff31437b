"""What a run reports: metrics file, console, picture, summary."""
