"""Executes planned programs in planned buffers."""
