"""`surogate plan` and `surogate train` choose the same device for any value of CUDA_VISIBLE_DEVICES."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

pytestmark = pytest.mark.gpu

BOTH = """
import sys
from surogate_core.machine.local_device import local_device
here = local_device()
assert "torch" not in sys.modules
from surogate_core.runtime.device import training_device
print(here.chosen, here.device, training_device(), sep="\\n")
"""


def uuid() -> str:
    command = ["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()[0]


@pytest.mark.parametrize("visible", [None, "0", "uuid", "", "-1", "99", "nonsense"])
def test_plan_and_train_choose_the_same_device(visible: str | None) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_VISIBLE_DEVICES"}
    if visible is not None:
        environment["CUDA_VISIBLE_DEVICES"] = uuid() if visible == "uuid" else visible
    done = subprocess.run(
        [sys.executable, "-c", BOTH], capture_output=True, text=True, check=True, timeout=120, env=environment
    )
    why, planned, trained = done.stdout.splitlines()
    assert planned == trained, why
    assert ("name='cpu'" in planned) == (visible in ("", "-1", "99", "nonsense")), why
