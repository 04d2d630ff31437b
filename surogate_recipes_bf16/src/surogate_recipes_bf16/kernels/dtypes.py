"""Dtypes of the kernels, and the checks of device and accumulation that the kernel families share."""

from __future__ import annotations

from surogate_core.api import Op, Support, Target

FLOATS = ("fp32", "bf16")
"""Dtypes of the kernels' floating-point operands."""


def supports_accumulate(op: Op, target: Target) -> Support:
    """Support SM80 or newer and accumulation into fp32 outputs.

    Accumulation into bf16 outputs is not supported, because small addends would be lost.
    """
    if (target.device.sm or 0) < 80:
        return Support(False, f"needs a GPU of SM80 or newer, not {target.device.title}")
    for i in op.accumulate:
        if op.outs[i].dtype != "fp32":
            return Support(False, f"accumulates only into fp32 outputs, got {op.outs[i]!r}")
    return Support(True)


def supports_write(op: Op, target: Target) -> Support:
    """Support SM80 or newer, without accumulation."""
    if op.accumulate:
        return Support(False, "cannot accumulate into its outputs")
    return supports_accumulate(op, target)
