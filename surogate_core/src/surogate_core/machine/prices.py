"""Shares of a device's rates that ops reach: prices of a class of devices, GPUs or CPUs, and of attention.

A GPU runs kernels, and `OpDef.memory_efficiency` says what those of an op reach. A CPU runs the torch references: they
write every intermediate result, whatever a kernel does, so all ops have the price of their class.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ..api import DeviceInfo, Op, OpDef

_CPU_MEMORY: Final = 0.4
_CPU_ATTENTION: Final = 0.2
"""Shares of a CPU's rates (`devices.cpu`): of its bandwidth by references, of its FLOP/s by attention, which computes
all scores. Rough: a step of `examples/quickstart.yaml`, planned at 220 ms, took 148 ms on two idle cores and up to 500
ms on busy ones (2026-11-24)."""

_H200_RATE: Final = 668e12
"""FLOP/s of products in bf16 on the device that attention was fitted to."""

_OTHER_ATTENTION: Final = 0.5
"""Share of a GPU's FLOP/s of attention that is not in the table: an estimate, between `attention` and its backward."""


@dataclass(frozen=True)
class _Attention:
    """Share of the rate of products that attention reaches on a GPU.

    most       with long rows and large heads
    half_head  size of a head at which half of the time goes into the softmax, whose exponentials do not depend on it
    half_row   length of documents, or of a window, which has two diagonals and twice the keys, at which half of the
               time is lost to the diagonal of the mask and to short loops
    fill       FLOPs that a Hopper computes in the time that filling and draining it take, at the rate of products. A
               slower device has the time of an H200, not its FLOPs: 18 us forward.
    """

    most: float
    half_head: int
    half_row: int
    fill: float

    def share(self, op: Op, flops: int, rate: float) -> float:
        head_dim, seq_len = int(op.attrs["head_dim"]), int(op.attrs["seq_len"])
        row = min(int(op.attrs.get("window", 0)) or seq_len, seq_len)
        lost = self.fill * min(1.0, rate / _H200_RATE)
        of_head, of_row = head_dim / (head_dim + self.half_head), row / (row + self.half_row)
        return min(self.most * of_head * of_row * flops / (flops + lost), 1.0)


_ATTENTION: Final[Mapping[str, _Attention]] = {
    "attention": _Attention(1.36, 80, 180, 12e9),
    "attention_bwd": _Attention(0.91, 40, 560, 20e9),
}
"""Fitted to cuDNN 9.19 for documents that fill their rows (H200s, 2026-11-23, `benchmarks/h200.md`).

Measured alone: 313 to 563 TFLOP/s forward and 223 to 406 backward, for 1,024 to 2,048 tokens and heads of 64 and 128.
Inside of steps, whose products run at the power limit, the kernels take about 14 % longer forward and 10 % backward;
that is included. Rows of shorter documents have less arithmetic (`OpDef.flops`), and a smaller share.
"""


def arithmetic_share(op: Op, definition: OpDef, flops: int, rate: float, device: DeviceInfo) -> float:
    """Return the share of `rate`, in FLOP/s, at which a device computes the `flops` of an op, which are not 0."""
    if not definition.is_attention:
        return 1.0
    if device.sm is None:
        return _CPU_ATTENTION
    known = _ATTENTION.get(op.kind)
    return known.share(op, flops, rate) if known else _OTHER_ATTENTION


def memory_share(definition: OpDef, device: DeviceInfo) -> float:
    """Return the share of its bandwidth at which a device moves the bytes of an op."""
    return _CPU_MEMORY if device.sm is None else definition.memory_efficiency
