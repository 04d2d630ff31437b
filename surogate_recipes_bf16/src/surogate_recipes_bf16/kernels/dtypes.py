"""What the families share: dtypes that they compute with, and what they say of devices and of outputs."""

from __future__ import annotations

from surogate_core.api import Op, Support, Target
from surogate_core.program.value import DTYPE_CODES

__all__ = ["DTYPE_CODES", "FLOATS", "adding", "writing"]

FLOATS = ("fp32", "bf16")
"""Dtypes that the kernels compute with."""


def adding(op: Op, target: Target) -> Support:
    """A GPU of SM80 or newer; outputs in fp32 may be added to, in bf16 not: small addends would vanish."""
    if (target.device.sm or 0) < 80:
        return Support(False, f"needs a GPU of SM80 or newer, not {target.device.title}")
    for i in op.accumulate:
        if op.outs[i].dtype != "fp32":
            return Support(False, f"adds to fp32 only, not to {op.outs[i]!r}")
    return Support(True)


def writing(op: Op, target: Target) -> Support:
    """A GPU of SM80 or newer; outputs are written, never added to."""
    if op.accumulate:
        return Support(False, "writes its outputs, does not add to them")
    return adding(op, target)
