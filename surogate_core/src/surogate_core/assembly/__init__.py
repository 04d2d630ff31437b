"""From the definitions of plugins to the programs of a run."""
