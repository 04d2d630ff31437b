"""Kernels that a run on a GPU lacks: modules that are not compiled for it, ops that no kernel serves. No torch."""

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


def unserved_ops(kernels: KernelTable) -> str:
    """Return the ops that no kernel serves on a GPU, with the reasons of every kernel that was considered.

    Empty on a CPU, or if every op has a kernel.
    """
    device = kernels.target.device if kernels.target else None
    if device is None or device.sm is None or not kernels.refused:
        return ""
    lines = (f"  {', '.join(kinds)}: {'; '.join(reasons)}" for reasons, kinds in kernels.refused.items())
    return "\n".join(
        [
            f"{device.title}: no compiled kernel serves these ops. Install a package that has one, or set "
            "kernels: allow_reference (slow).",
            *lines,
        ]
    )
