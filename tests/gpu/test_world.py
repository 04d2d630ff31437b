"""Ranks that share a GPU, as threads and as processes, train as one rank does with the same rows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from end_to_end.product import losses, make_workplace, records, write_model
from end_to_end.several import trained
from safetensors.torch import load_file

pytestmark = pytest.mark.gpu

PRECISIONS: dict[str, dict[str, Any]] = {
    "fp32": {"model_dtype": "fp32"},
    "bf16": {"model_dtype": "bf16", "param_grad_dtype": "bf16"},
    "fp8": {"model_dtype": "bf16", "recipe": "fp8-hybrid", "fp8_amax_history": 4},
    "lora": {"model_dtype": "bf16", "lora": True, "from_scratch": False},
}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_ranks_of_one_gpu_train_as_one_and_processes_as_threads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, precision: str
) -> None:
    """Processes exchange through the host, threads in device memory, both in order of rank: their bits are equal."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # with two GPUs, each process would have ranks on one of its own
    place = make_workplace(tmp_path, deterministic="true", max_steps=8, eval_steps=4, **PRECISIONS[precision])
    write_model(tmp_path / "model", hidden_size=256, head_dim=64)

    if precision == "lora":
        base = place.write(output_dir=str(tmp_path / "base"), max_steps=2, warmup_steps=0, lora=None, from_scratch=True)
        assert place.surogate("train", base).returncode == 0
        place = replace(place, config={**place.config, "model": str(tmp_path / "base")})

    def keys(name: str, batch: int, accumulation: int, **more: Any) -> Path:
        rows = {"per_device_train_batch_size": batch, "gradient_accumulation_steps": accumulation}
        return place.write(output_dir=str(tmp_path / name), **rows, **more)

    for given in (("one", 4, 2, 1), ("threads", 2, 2, 2)):
        done = place.surogate("train", keys(*given[:3], ranks_per_gpu=given[3]))
        assert done.returncode == 0, done.stdout + done.stderr
    rows = {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2, "max_steps": 8}
    trained(place, output_dir=str(tmp_path / "processes"), ranks_per_gpu=2, **rows)
    one, threads, processes = (tmp_path / name for name in ("one", "threads", "processes"))
    assert losses(threads) == pytest.approx(losses(one), rel=2e-5 if precision == "fp32" else 5e-3)
    assert losses(processes) == losses(threads)
    evals = [[record["loss"] for record in records(out, "eval")] for out in (threads, processes)]
    assert evals[0] == pytest.approx(evals[1], rel=1e-6)
    name = "adapter/adapter_model.safetensors" if precision == "lora" else "model.safetensors"
    left, right = load_file(threads / name), load_file(processes / name)
    assert left.keys() == right.keys() and all(left[key].equal(right[key]) for key in left)


def test_four_ranks_of_one_gpu_train_as_one(tmp_path: Path) -> None:
    place = make_workplace(tmp_path, max_steps=6, model_dtype="fp32")
    write_model(tmp_path / "model", hidden_size=256, head_dim=64)
    for name, batch, ranks in (("one", 4, 1), ("four", 1, 4)):
        config = place.write(output_dir=str(tmp_path / name), per_device_train_batch_size=batch, ranks_per_gpu=ranks)
        done = place.surogate("train", config)
        assert done.returncode == 0, done.stdout + done.stderr
    assert losses(tmp_path / "four") == pytest.approx(losses(tmp_path / "one"), rel=2e-5)
