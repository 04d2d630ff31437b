"""Lifetimes, the static arena plan, the report and the device table. No torch."""
