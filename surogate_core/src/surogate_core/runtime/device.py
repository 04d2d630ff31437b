"""Which device a run trains on. `machine/local_device.py` tells the same without torch."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..api import DeviceInfo
from ..errors import ConfigError
from ..memory.devices import cpu, gpu


def training_device() -> DeviceInfo:
    """The first visible GPU, else this machine's processors. CUDA_VISIBLE_DEVICES= (empty) chooses the processors."""
    if not torch.cuda.is_available():
        return cpu()
    found = torch.cuda.get_device_properties(0)
    return gpu(found.name, found.major * 10 + found.minor, found.total_memory)


def gpu_uuids(indices: Sequence[int]) -> list[str]:
    """The driver's names of GPUs, by their index among the visible ones."""
    return [f"GPU-{torch.cuda.get_device_properties(index).uuid}" for index in indices]


def devices_to_use(gpus: int) -> int:
    """How many devices the config's `gpus` means here: that many GPUs, 0 for all visible; 1 where the CPU trains.

    Raises ConfigError when so many are not visible, or are not of one kind.
    """
    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    count = gpus or max(visible, 1)
    if count == 1:
        return 1
    if count > visible:
        seen = f"{visible} {'is' if visible == 1 else 'are'} visible" if visible else "no GPU is visible"
        alone = "" if visible else ", and a CPU trains alone"
        raise ConfigError(
            f"gpus: {count}: {seen} here{alone}. Use gpus: {max(visible, 1)}, or 0 for all that there are."
        )
    found = [torch.cuda.get_device_properties(index) for index in range(count)]
    kinds = [f"{p.name}, {p.multi_processor_count} processors, {p.total_memory >> 30} GiB" for p in found]
    if len(set(kinds)) > 1:
        listed = "; ".join(f"GPU {index}: {kind}" for index, kind in enumerate(kinds))
        raise ConfigError(
            f"gpus: {count}: the GPUs differ ({listed}); a step would be as slow as the slowest and as small as the "
            "smallest. Choose equal ones with CUDA_VISIBLE_DEVICES, or use gpus: 1."
        )
    return count
