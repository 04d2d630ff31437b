"""Lifetimes, the memory plan, its report and the device table. Imports no torch."""
