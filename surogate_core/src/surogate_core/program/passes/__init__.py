"""Passes: functions that transform one program into another. `assemble.py` calls them in a fixed order."""
