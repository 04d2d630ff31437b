"""The device that a run trains on, by torch. `machine/local_device.py` finds the same device without torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..api import DeviceInfo
from ..errors import ConfigError
from ..machine.devices import cpu, gpu


def training_device() -> DeviceInfo:
    """Return the first visible GPU, or the CPU if none is. CUDA_VISIBLE_DEVICES= (empty) selects the CPU."""
    if not torch.cuda.is_available():
        return cpu()
    found = torch.cuda.get_device_properties(0)
    return gpu(found.name, found.major * 10 + found.minor, found.total_memory)


def gpu_uuids(indices: Sequence[int]) -> list[str]:
    """Return the UUIDs of GPUs, given by their indices among the visible ones."""
    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in indices]


def refuse_unequal(devices: Sequence[int]) -> None:
    """Raise ConfigError if GPUs, given by their indices among the visible ones, are different models."""
    found = {index: torch.cuda.get_device_properties(index) for index in sorted(set(devices))}
    kinds = {
        index: f"{p.name}, {p.multi_processor_count} processors, {p.total_memory >> 30} GiB"
        for index, p in found.items()
    }
    if len(set(kinds.values())) > 1:
        listed = "; ".join(f"GPU {index}: {kind}" for index, kind in kinds.items())
        raise ConfigError(
            f"gpus: {len(kinds)}: the GPUs differ ({listed}), so a step would have the speed and the memory of the "
            "weakest. Select equal GPUs with CUDA_VISIBLE_DEVICES, or use gpus: 1."
        )
