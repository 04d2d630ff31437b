"""Settings that fit a device, the fastest first: `--fit`, and suggestions for a run that does not fit."""
