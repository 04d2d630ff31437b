"""An op for Surogate: max(x, 0)^2, element by element"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from surogate_core.api import OpDef, OutSpec, ProgramError, Value, provides

if TYPE_CHECKING:  # `surogate plan` runs without torch
    from torch import Tensor

SUROGATE_API = {"ops": 1}


def infer(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    """Return label, shape and dtype of each output."""
    if len(ins) != 1 or ins[0].dtype not in ("fp32", "bf16"):
        raise ProgramError(f"acme_toy takes one value in fp32 or bf16, got {ins}")
    return [OutSpec("acme_toy", ins[0].shape, ins[0].dtype)]


def reference(x: Tensor) -> Tensor:
    """The definition of the op. It returns a new tensor, and is differentiated by autograd."""
    return x.float().relu().square().to(x.dtype)


OP = OpDef(
    kind="acme_toy",
    infer=infer,
    reference=f"{__name__}:reference",
    flops=lambda op: 2 * op.ins[0].size,
)
"""A backward rule, `vjp`, and kernels can come later: they change nothing here."""

SUROGATE_EXAMPLES = {"op acme_toy": [{"ins": ["fp32[6,8]"]}, {"ins": ["bf16[6,8]"]}]}
"""Inputs for `surogate plugins test`."""

surogate_ops = provides([OP])
