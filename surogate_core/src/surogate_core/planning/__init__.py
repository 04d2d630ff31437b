"""From a config to planned programs, without torch or a device."""
