"""The op program: values, ops, the builder, reverse mode, passes. No torch."""
