"""The machine that a command runs on: devices, memory, cache folder, timing of start-up."""
