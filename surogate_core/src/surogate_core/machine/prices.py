"""Shares of a device's rates that ops reach: a table of prices for each class of devices, GPUs and CPUs.

An op says its work: FLOPs, bytes, and whether it is attention (`OpDef`). A kernel may say at which share of the
bandwidth it moves the bytes (`KernelDef.memory_efficiency`), because that is a property of its code. All else is here.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from ..api import DeviceInfo, Op, OpDef

_H200_RATE: Final = 668e12
"""FLOP/s of products in bf16 on the device that attention was fitted to."""

_ELEMENTWISE: Final = 32
"""FLOPs for each value that is read or written: more are those of products."""


_LONG: Final = 16_384
"""Rows of more tokens take more and more of a step's time in attention."""


@dataclass(frozen=True)
class _Attention:
    """Share of the rate of products that attention reaches.

    most       with long rows and large heads
    half_head  size of a head at which half of the time goes into the softmax, whose exponentials do not depend on it
    half_row   length of documents, or of a window that it skips, which has two diagonals and twice the keys, at which
               half of the time is lost to the diagonal of the mask and to short loops
    fill       FLOPs that a Hopper computes in the time that filling and draining it take, at the rate of products. A
               slower device has the time of an H200, not its FLOPs: 18 us forward.
    wide       share of this that heads of more than 128 reach
    alone      share that it gains in rows far longer than `_LONG`, whose steps are attention and little else. Half of
               it at twice as many tokens.
    skips      whether it skips what a window hides; else it takes as long as without a window
    """

    most: float
    half_head: int
    half_row: int
    fill: float
    wide: float = 1.0
    alone: float = 0.0
    skips: bool = True

    def share(self, op: Op, flops: int, rate: float) -> float:
        head_dim, seq_len = int(op.attrs["head_dim"]), int(op.attrs["seq_len"])
        row, seen = min(int(op.attrs.get("window", 0)) or seq_len, seq_len), 1.0
        if not self.skips:
            row, seen = seq_len, row * (2 * seq_len - row) / seq_len**2
            flops = int(flops / seen)
        lost = self.fill * min(1.0, rate / _H200_RATE)
        of_head, of_row = head_dim / (head_dim + self.half_head), row / (row + self.half_row)
        most = self.most * (self.wide if head_dim > 128 else 1.0) * (1 + self.alone * max(0.0, 1 - _LONG / row))
        return seen * most * of_head * of_row * flops / (flops + lost)


@dataclass(frozen=True)
class Prices:
    """Shares of its rates that a class of devices reaches.

    memory          of the bandwidth, by ops whose kernel does not say
    attention       of the FLOP/s, by `OpDef.attention`
    moved_per_flop  bytes that ops without products read and write for each FLOP, where it is a pass over memory
    """

    memory: float
    attention: Mapping[str, _Attention]
    moved_per_flop: int = 0


GPU: Final = Prices(
    memory=0.8,
    attention={
        "forward": _Attention(1.36, 80, 180, 12e9, wide=0.8),
        "backward": _Attention(0.91, 40, 560, 20e9, wide=0.64, alone=0.13, skips=False),
    },
)
"""Memory: what element-wise kernels and norms reach in steps at the power limit of an H200, 0.65 to 0.98 alone.

Attention: fitted to cuDNN 9.19 for documents that fill their rows (H200s, 2026-11-23, `benchmarks/h200.md`).

Measured alone: 313 to 563 TFLOP/s forward and 223 to 406 backward, for 1,024 to 2,048 tokens and heads of 64 and 128.
Inside of steps, whose products run at the power limit, the kernels take about 14 % longer forward and 10 % backward;
that is included. Rows of shorter documents have less arithmetic (`OpDef.flops`), and a smaller share. With a window of
1,024 a row of 8,192 takes 269 us in place of 894 forward, and 3,862 in place of 3,883 backward; 2 x 2,048 with 16 heads
of 256 take 154 and 754 us, with 32 heads of 128 149 and 546 (H100, 2026-11-25).

Long rows: backward of 32 heads of 128 ran at 528 TFLOP/s inside of a step of 131,072 tokens and at 523 in one of
524,288 (H200, 2026-11-30, `benchmarks/h200.md`), where shorter rows let expect 463; forward as fast as they let expect.
"""

CPU: Final = Prices(
    memory=0.8,
    attention={
        "forward": _Attention(0.53, 230, 0, 0, skips=False),
        "backward": _Attention(0.53, 180, 0, 0, skips=False),
    },
    moved_per_flop=8,
)
"""Of references: torch functions, each of which reads and writes memory.

Attention computes all scores, of which `OpDef.flops` counts half, and its softmax makes several passes over them: on
one core 6 to 9 ns a score forward and 10 to 18 backward besides its products, twice that if they exceed the cache.
Measured steps of one core are in `tests/memory/test_step_times.py`.
"""


def prices(device: DeviceInfo) -> Prices:
    """Return the table of the device's class."""
    return CPU if device.sm is None else GPU


def arithmetic_share(op: Op, definition: OpDef, flops: int, rate: float, device: DeviceInfo) -> float:
    """Return the share of `rate`, in FLOP/s, at which a device computes the `flops` of an op, which are not 0."""
    return prices(device).attention[definition.attention].share(op, flops, rate) if definition.attention else 1.0


def moved_between(op: Op, definition: OpDef, flops: int, device: DeviceInfo) -> int:
    """Return the bytes of intermediate results that a device reads and writes in memory for an op."""
    per_flop = prices(device).moved_per_flop
    if not per_flop or definition.product or definition.attention:
        return 0
    values = sum(v.size for v in (*op.ins, *op.outs))
    return flops * per_flop if flops < _ELEMENTWISE * values else 0
