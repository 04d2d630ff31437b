"""A GPU run that diverges exits with code 3 and names the first op with a non-finite result."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
from end_to_end.product import make_workplace, records, write_model

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("gpus", [1, 2])
@pytest.mark.parametrize("dtypes", [{"model_dtype": "fp32"}, {"model_dtype": "bf16"}], ids=["fp32", "bf16"])
def test_a_run_that_diverges_names_the_first_op_with_a_non_finite_result(
    tmp_path: Path, gpus: int, dtypes: dict[str, str]
) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"{gpus} GPUs are not visible")
    changes = {"learning_rate": 1e30, "lr_scheduler_type": "constant", "max_steps": 60, "max_nonfinite_steps": 2}
    place = make_workplace(tmp_path, gpus=gpus, **changes, **dtypes)
    write_model(tmp_path / "model", hidden_size=256, head_dim=64)
    done = place.surogate("train", place.write())
    assert done.returncode == 3, done.stdout + done.stderr
    message = " ".join(done.stderr.split())
    assert re.search(r"repeated op by op: step \d+, .* wrote NaN or inf\. op \d+ of ", message), message
    assert "run by compiled kernel of surogate-" in message
    assert [step.get("skipped", False) for step in records(place.out, "step")[-3:]] == [True] * 3
