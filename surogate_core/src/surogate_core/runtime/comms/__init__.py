"""The ways in which ranks exchange memory: implementations of `api.Comm`."""
