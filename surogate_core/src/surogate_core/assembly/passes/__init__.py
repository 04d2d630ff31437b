"""The passes of a run, one a file: functions from a draft to the next. `assemble.PASSES` is their order."""
