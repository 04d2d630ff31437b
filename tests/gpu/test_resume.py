"""A GPU run that resumes from a checkpoint is bit-identical to an uninterrupted one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from end_to_end.product import make_workplace, records, write_model
from safetensors.torch import load_file

pytestmark = pytest.mark.gpu

MASTERS = {"model_dtype": "bf16", "master_dtype": "fp32", "optimizer_state_dtype": "bf16", "param_grad_dtype": "bf16"}
MASTERS |= {"optimizer": "adamw"}
NVFP4 = {"model_dtype": "bf16", "recipe": "nvfp4", "skip_quant_first_layers": 0, "skip_quant_last_layers": 0}
FP8 = {"model_dtype": "bf16", "recipe": "fp8-hybrid", "fp8_amax_history": 4}


def steps(output: Path) -> list[tuple[int, float, float]]:
    return [(record["step"], record["loss"], record["norm"]) for record in records(output, "step")]


@pytest.mark.parametrize(("gpus", "ranks"), [(1, 1), (1, 2), (2, 1)], ids=["alone", "two ranks", "two GPUs"])
@pytest.mark.parametrize(
    "precision",
    [{"model_dtype": "fp32"}, MASTERS, FP8, NVFP4, MASTERS | {"optimizer": "normuon"}],
    ids=["fp32", "masters", "fp8", "nvfp4", "normuon"],
)
def test_a_resumed_run_is_bit_identical_to_an_uninterrupted_one(
    tmp_path: Path, gpus: int, ranks: int, precision: dict[str, Any]
) -> None:
    if torch.cuda.device_count() < gpus:
        pytest.skip(f"{gpus} GPUs are not visible")
    changes = {"deterministic": "true", "max_steps": 20, "save_steps": 10, "eval_steps": 5, "gpus": gpus}
    changes |= {"ranks_per_gpu": ranks}
    place = make_workplace(tmp_path, **changes, **precision)
    write_model(tmp_path / "model", hidden_size=256, head_dim=64)
    straight, resumed = tmp_path / "straight", tmp_path / "resumed"
    keys = (("recompute_block=true",), ("recompute_swiglu=true", "offload_optimizer=true"))  # which change no bit
    for output, checkpoint, chosen in zip(
        (straight, resumed), ("false", str(straight / "step_00000010")), keys, strict=True
    ):
        changes = (f"resume_from_checkpoint={checkpoint}", *chosen)
        overrides = [word for change in changes for word in ("--set", change)]
        done = place.surogate("train", place.write(output_dir=str(output)), *overrides)
        assert done.returncode == 0, done.stdout + done.stderr
    assert steps(resumed) == steps(straight)[10:]
    files = sorted(path.relative_to(straight) for path in (straight / "step_00000020").rglob("*.safetensors"))
    assert len(files) == 2
    for file in files:
        one, other = load_file(straight / file), load_file(resumed / file)
        assert one.keys() == other.keys()
        different = [name for name in one if not torch.equal(one[name], other[name])]
        assert not different, (file, different)
