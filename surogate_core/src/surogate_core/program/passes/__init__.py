"""Transformations of one program, which know no run. The passes of a run, in `assembly/passes/`, apply them."""
