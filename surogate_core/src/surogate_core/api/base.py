"""What all pages share: options, support, devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import BaseModel, ConfigDict


class NoOptions(BaseModel):
    """The options of a plugin that has none."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class Support:
    """Whether something can be used, and if not, one sentence that says why."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """A device as the planner sees it. `surogate plan --device` picks one from the table, without the hardware.

    sm: compute capability as one number (90 for Hopper); None for a CPU. `flops`: sustained matrix-product FLOP/s by
    operand dtype. `bandwidth`: bytes/s of reads and writes together. `launch_seconds`: floor of any op.
    `runtime_bytes`: what the process holds on the device besides the plan's buffers. `link_bandwidth`: bytes/s that it
    sends to another device of its machine while it receives as many.
    """

    name: str
    title: str
    sm: int | None
    memory_bytes: int
    flops: Mapping[str, float]
    bandwidth: float
    launch_seconds: float
    runtime_bytes: int
    source: str
    link_bandwidth: float = 25e9


Deterministic = Literal["auto", "true", "false"]
"""Whether a run must give the same bits as the one before it.

auto: where a kernel can afford it, and where not the user is told. true: always, else the run is refused before it
begins. false: whatever is fastest.
"""


@dataclass(frozen=True)
class Target:
    """What kernels are chosen, priced and bound for."""

    device: DeviceInfo
    deterministic: Deterministic = "auto"
