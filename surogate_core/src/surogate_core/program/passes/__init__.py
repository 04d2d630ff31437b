"""Passes: functions from program to program, in the fixed order that `assemble.py` gives them."""
