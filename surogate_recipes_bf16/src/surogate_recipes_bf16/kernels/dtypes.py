"""Dtypes of the kernels, and the checks of accumulation that the kernel families share."""

from __future__ import annotations

from surogate_core.api import Op, Support, Target

FLOATS = ("fp32", "bf16")
"""Dtypes of the kernels' floating-point operands."""


def supports_accumulate(op: Op, target: Target) -> Support:
    """Support accumulation into fp32 outputs.

    Accumulation into bf16 outputs is not supported, because small addends would be lost.
    """
    for i in op.accumulate:
        if op.outs[i].dtype != "fp32":
            return Support(False, f"accumulates only into fp32 outputs, got {op.outs[i]!r}")
    return Support(True)


def supports_write(op: Op, target: Target) -> Support:
    """Support outputs that are written, not added to."""
    if op.accumulate:
        return Support(False, "cannot accumulate into its outputs")
    return supports_accumulate(op, target)
