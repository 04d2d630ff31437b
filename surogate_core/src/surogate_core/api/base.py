"""Definitions used by several kinds of plugins: options, support, devices."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, TypeVar

from pydantic import BaseModel, ConfigDict

from ..origin import Declared

Options = TypeVar("Options", bound=BaseModel)
"""The class of a definition's options, which its functions get an instance of."""


class NoOptions(BaseModel):
    """For definitions without options."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True)
class Support(Declared):
    """Whether something is supported, and if not, the reason in one sentence."""

    ok: bool
    reason: str = ""


@dataclass(frozen=True)
class Link:
    """A way from a device to other devices.

    name       as in "over NVLink"
    bandwidth  bytes/s that a device sends while it receives at the same rate
    source     where the rate comes from
    taken      by how much of the time of a collective concurrent kernels take longer, because it runs on
               multiprocessors too
    gathered   the same of gathers, which copy engines make
    """

    name: str
    bandwidth: float
    source: str = "not measured"
    taken: float = 0.0
    gathered: float = 0.0


@dataclass(frozen=True, kw_only=True)
class DeviceInfo:
    """The properties of a device that plans depend on. `surogate plan --device` reads them from the device table.

    sm              compute capability as one number (90 for Hopper); None for a CPU
    flops           FLOP/s of matrix products inside a training step, by operand dtype or other name (`OpDef.math`)
    bandwidth       bytes/s of reads and writes together
    launch_seconds  time of an op besides its arithmetic and traffic
    runtime_bytes   device memory of a process besides the planned buffers
    source          where the rates come from
    link            to the other devices of the machine
    network         to devices of other machines. Devices of a machine send at this rate each, at the same time.
    host_bandwidth  bytes/s of copies to, and at the same time from, pinned memory of the host
    peak_flops      the vendor's dense peak in bf16 with sums in fp32, FLOP/s, of which MFU is a share; 0: not known
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
    link: Link = Link("PCIe", 25e9)
    network: Link = Link("a network of 12.5 Gb/s a GPU", 1.25e9)
    host_bandwidth: float = 20e9
    peak_flops: float = 0.0


Deterministic = Literal["auto", "true", "false"]
"""Whether equal runs must be bit-identical.

auto    where this is cheap; otherwise the user gets a notice
true    always; a run that cannot be is refused before it starts
false   no; the fastest algorithms are used
"""


@dataclass(frozen=True)
class Target:
    """The device, and the determinism, that kernels are selected, priced and bound for."""

    device: DeviceInfo
    deterministic: Deterministic = "auto"
