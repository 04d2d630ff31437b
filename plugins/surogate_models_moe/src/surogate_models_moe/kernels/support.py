"""The check that the kernels of this package share: widths in words of 16 bytes."""

from __future__ import annotations

from surogate_core.api import Op, Support, Target

WORD = 8
"""bf16 elements in 16 bytes, which a thread loads at once."""


def supports(op: Op, target: Target, *widths: int, accumulate: bool = False) -> Support:
    """Support `widths` that are whole words. Outputs are added to only with `accumulate`."""
    if op.accumulate and not accumulate:
        return Support(False, "cannot accumulate into its outputs")
    odd = next((width for width in widths if width % WORD), None)
    return Support(True) if odd is None else Support(False, f"widths must be multiples of {WORD}, got {odd}")
