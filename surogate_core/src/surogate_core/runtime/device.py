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


def devices_to_use(gpus: int) -> int:
    """Return the number of devices that the key `gpus` selects: for 0 all visible GPUs, or the CPU if there are none.

    Raises ConfigError if fewer are visible, or if they are different models.
    """
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    count = gpus or max(visible, 1)
    if count == 1:
        return 1
    if count > visible:
        seen = f"{visible} {'is' if visible == 1 else 'are'} visible" if visible else "no GPU is visible"
        alone = "" if visible else ", and only one CPU can train"
        raise ConfigError(f"gpus: {count}: {seen} here{alone}. Use gpus: {max(visible, 1)}, or 0 for all visible GPUs.")
    found = [torch.cuda.get_device_properties(index) for index in range(count)]
    kinds = [f"{p.name}, {p.multi_processor_count} processors, {p.total_memory >> 30} GiB" for p in found]
    if len(set(kinds)) > 1:
        listed = "; ".join(f"GPU {index}: {kind}" for index, kind in enumerate(kinds))
        raise ConfigError(
            f"gpus: {count}: the GPUs differ ({listed}), so a step would have the speed and the memory of the weakest. "
            "Select equal GPUs with CUDA_VISIBLE_DEVICES, or use gpus: 1."
        )
    return count
