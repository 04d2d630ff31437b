"""Compiled kernels that a run on a GPU needs and that are not there: found before the run starts. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from ..api import DeviceInfo
from ..api.compiled import problem
from ..machine.local_device import USE_THE_CPU

if TYPE_CHECKING:
    from .prepare import Prepared


def idle_modules(prepared: Prepared) -> Mapping[str, str]:
    """Compiled modules that serve ops of this plan and cannot run on its GPU: {import name: why}. Empty for a CPU."""
    sm = prepared.target.device.sm
    if sm is None:
        return {}
    serving = {
        item.definition.module
        for item in prepared.registry.provided
        if item.kind == "kernel" and prepared.kernels.get(item.name) == item.plugin.distribution
    }
    found = {module: problem(module, sm) for module in sorted(serving) if module}
    return {module: why for module, why in found.items() if why}


def idle_kernels(device: DeviceInfo, idle: Mapping[str, str]) -> str:
    """One line that says what `idle_modules` found, and what to do."""
    modules = ", ".join(f"{module} {why}" for module, why in idle.items())
    return (
        f"{device.title} is here, but kernels for it (SM{device.sm}) are not: {modules}. Compile them: `make install` "
        "in a checkout, else install these packages again with SUROGATE_CUDA=on, which takes nvcc of CUDA 13 from the "
        f"PATH or from NVIDIA's wheels; or {USE_THE_CPU}; or set kernels: allow_reference (slow)."
    )
