"""The command `surogate profile`: times the steps of a run op by op, on the device that the run would use."""
