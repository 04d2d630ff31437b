"""A reading arrives while the next step is queued; the reported time of a step is that of the device all the same."""

from __future__ import annotations

from pathlib import Path
from statistics import median

import pytest
import torch
from end_to_end.product import make_workplace, records, write_model

from .alone import ALONE

pytestmark = [pytest.mark.gpu, ALONE]


@pytest.mark.parametrize("gpus", [1, 2])
def test_the_last_of_many_alike_steps_is_reported_as_long_as_the_others(tmp_path: Path, gpus: int) -> None:
    """Compared within one run. With 32 micro-steps the host is most of a step ahead when it reads the one before."""
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"{gpus} GPUs are not visible")
    place = make_workplace(
        tmp_path, max_steps=12, gradient_accumulation_steps=32, eval_steps=0, save_steps=0, gpus=gpus
    )
    write_model(tmp_path / "model", hidden_size=256, head_dim=64)
    done = place.surogate("train", place.write())
    assert done.returncode == 0, done.stdout + done.stderr
    seconds = [record["duration_ms"] for record in records(place.out, "step")]
    usual = median(seconds[2:-1])
    assert 0.6 * usual < seconds[-1] < 1.7 * usual, seconds
