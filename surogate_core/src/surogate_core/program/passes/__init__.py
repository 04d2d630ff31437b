"""Passes: functions that transform one program into another. `planning/assemble.py` calls them in a fixed order."""
