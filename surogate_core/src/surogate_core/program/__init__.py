"""The op program: values, ops, the builder, reverse-mode differentiation and passes. Imports no torch."""
