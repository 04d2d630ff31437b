"""Runs in separate processes give bit-identical weights, captured or eager."""

from __future__ import annotations

from hashlib import sha256
from pathlib import Path

import pytest
from end_to_end.product import losses, make_workplace, write_model

pytestmark = pytest.mark.gpu


def test_two_captured_processes_and_an_eager_one_are_bit_identical(tmp_path: Path) -> None:
    """The first process times its matrix products. The others use its cached algorithms."""
    place = make_workplace(tmp_path, gpus=1, model_dtype="bf16")
    write_model(tmp_path / "model", hidden_size=256, head_dim=64)
    weights, curves = set(), []
    for name, graphs in (("first", True), ("second", True), ("eager", False)):
        done = place.surogate("train", place.write(output_dir=str(tmp_path / name), use_cuda_graphs=graphs))
        assert done.returncode == 0, done.stdout + done.stderr
        weights.add(sha256((tmp_path / name / "model.safetensors").read_bytes()).hexdigest())
        curves.append(losses(tmp_path / name))
    assert curves[0] == curves[1] == curves[2]
    assert len(weights) == 1
    assert list((tmp_path / "cache/surogate/autotune/products").glob("*.json"))
