"""Packages for new plugins of Surogate, from templates."""
