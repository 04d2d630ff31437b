"""Rates of a card that were measured on it, in place of those of the device table."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from ..api import DeviceInfo


@dataclass(frozen=True, kw_only=True)
class MeasuredRates:
    """The fields of `DeviceInfo` that are measured.

    title  name of the card, as the driver gives it
    date   of the measurement, YYYY-MM-DD
    """

    title: str
    date: str
    flops: Mapping[str, float]
    bandwidth: float
    launch_seconds: float
    host_bandwidth: float

    def of(self, device: DeviceInfo) -> DeviceInfo:
        """Return the device with these rates in place of its own."""
        return replace(
            device,
            flops={**device.flops, **self.flops},
            bandwidth=self.bandwidth,
            launch_seconds=self.launch_seconds,
            host_bandwidth=self.host_bandwidth,
            source=f"measured here {self.date}",
        )
