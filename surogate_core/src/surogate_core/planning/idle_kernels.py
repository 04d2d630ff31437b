"""Finds compiled kernels that a run on a GPU needs and that are missing, before the run starts. No torch."""

from __future__ import annotations

from collections.abc import Mapping

from ..api import DeviceInfo
from ..api.compiled import problem
from ..machine.local_device import USE_THE_CPU
from .resolve import KernelTable


def idle_modules(kernels: KernelTable) -> Mapping[str, str]:
    """Return the compiled modules of `kernels` that cannot run on its GPU: {import name: why}. Empty for a CPU."""
    sm = kernels.target.device.sm if kernels.target else None
    if sm is None:
        return {}
    found = {module: problem(module, sm) for module in sorted(kernels.modules)}
    return {module: why for module, why in found.items() if why}


def idle_kernels(device: DeviceInfo, idle: Mapping[str, str]) -> str:
    """Return one line that says what `idle_modules` found, and what to do."""
    modules = ", ".join(f"{module} {why}" for module, why in idle.items())
    return (
        f"kernels for {device.title} (SM{device.sm}) are missing: {modules}. Compile them: `make install` in a "
        "checkout, or reinstall these packages with SUROGATE_CUDA=on, which uses nvcc of CUDA 13 from the PATH or from "
        f"NVIDIA's wheels; or {USE_THE_CPU}; or set kernels: allow_reference (slow)."
    )
