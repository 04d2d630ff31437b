"""An op for Surogate with a CUDA kernel: max(x, 0)^2, element by element"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surogate_core.api import (
    BindContext,
    Call,
    KernelDef,
    Op,
    OpDef,
    OutSpec,
    ProgramError,
    Support,
    Target,
    Value,
    provides,
)
from surogate_core.api.compiled import compiled_hooks

if TYPE_CHECKING:  # `surogate plan` runs without torch
    from torch import Tensor

SUROGATE_API = {"ops": 1, "kernels": 1, "diagnose": 1}
CODES = {"fp32": 0, "bf16": 1}  # of <surogate/dtype.h>


def infer(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    """Return label, shape and dtype of each output."""
    if len(ins) != 1 or ins[0].dtype not in CODES:
        raise ProgramError(f"acme_toy takes one value in fp32 or bf16, got {ins}")
    return [OutSpec("acme_toy", ins[0].shape, ins[0].dtype)]


def reference(x: Tensor) -> Tensor:
    """The definition of the op, which the kernel is tested against."""
    return x.float().relu().square().to(x.dtype)


OP = OpDef(kind="acme_toy", infer=infer, reference=f"{__name__}:reference", flops=lambda op: 2 * op.ins[0].size)


def supports(op: Op, target: Target) -> Support:
    """Return whether the kernel can run the op there. Cheap: does not import the compiled module."""
    return Support(target.device.sm is not None, "needs a GPU")


def bind(op: Op, context: BindContext) -> Call:
    """Return the launch: values become device addresses, and the stream is the last argument."""
    from . import _C

    (x,), (y,) = op.ins, op.outs
    return context.call(_C.square, x, y, x.size, CODES[x.dtype])


KERNELS = tuple(KernelDef(op="acme_toy", dtypes=(dtype, dtype), supports=supports, bind=bind) for dtype in CODES)

SUROGATE_EXAMPLES = {"op acme_toy": [{"ins": [f"{dtype}[8192,2048]"]} for dtype in CODES]}
"""Inputs for `surogate plugins test`, which also measures kernels on them."""

surogate_ops = provides([OP])
surogate_kernels, surogate_diagnose = compiled_hooks("acme_plugin", KERNELS)
