"""From a config to a plan: programs, memory and time, without torch or a device."""
