"""Passes: functions that transform one program into another. `assembly/assemble.py` calls them in a fixed order."""
