"""A run on a GPU without enough memory ends with plan and reality, and leaves the GPU usable."""

from __future__ import annotations

import pytest
import torch
from gpu.harness import Setup

from surogate_core.errors import RunStopped

pytestmark = pytest.mark.gpu


def test_the_error_names_plan_and_reality() -> None:
    setup = Setup()
    total = torch.cuda.mem_get_info()[1]
    torch.cuda.empty_cache()
    torch.cuda.set_per_process_memory_fraction(
        (torch.cuda.memory_allocated() + setup.assembly.memory.nbytes // 4) / total
    )
    try:
        with pytest.raises(RunStopped, match=r"is out of memory\. Planned: weights .* \(not allocated\).* are free\. "):
            setup.gpu()
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    setup.gpu().close()
