"""The command line, under the name that it had until 0.2."""
