"""The YAML file: its keys, their checks, and the messages about them."""
