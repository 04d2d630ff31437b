"""The command `surogate check-serving`: compares what a server computes with the model that a run has written."""
