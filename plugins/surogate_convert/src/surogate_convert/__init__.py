"""Converts configs of other trainers. The mapping of each is a table in `tables/`; `rules.py` describes it."""
