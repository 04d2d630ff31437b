"""Devices for tests: those of the device table, and the GPU of this machine."""

from __future__ import annotations

from ..machine.devices import DEVICES, cpu, device
from ..runtime.device import training_device

__all__ = ["DEVICES", "cpu", "device", "training_device"]
