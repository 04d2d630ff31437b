"""A run as its user asked for it, the ranks that it has, and what the planner is given for it."""
