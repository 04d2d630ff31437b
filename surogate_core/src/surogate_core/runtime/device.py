"""Which device a run trains on. `local_device.py` tells the same without torch."""

from __future__ import annotations

import torch

from ..api import DeviceInfo
from ..memory.devices import cpu, gpu


def training_device() -> DeviceInfo:
    """The first visible GPU, else this machine's processors. CUDA_VISIBLE_DEVICES= (empty) chooses the processors."""
    if not torch.cuda.is_available():
        return cpu()
    found = torch.cuda.get_device_properties(0)
    return gpu(found.name, found.major * 10 + found.minor, found.total_memory)
