"""The processes of a run: how they join, agree, and notice that one of them is gone."""
