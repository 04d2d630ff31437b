"""Weights that a run draws are those of one rank, on any number of ranks that hold a part of each."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from routed_family import EXPERTS, write_config
from safetensors.torch import load_file
from torch import Tensor

from surogate import run
from surogate.training import worker_setup

STILL = {"learning_rate": 0, "weight_decay": 0, "max_steps": 1}


def drawn(folder: Path, **keys: Any) -> dict[str, Tensor]:
    folder.mkdir()
    done = run.train(run.load(write_config(folder, **STILL, **keys)), notice=lambda line: None)
    return load_file(done.output_dir / "model.safetensors")


WEIGHTS = {"shard_weights": True}
WHOLE = {**WEIGHTS, "whole_blocks": 1}


@pytest.mark.parametrize(
    ("parts", "drawn_together"),
    [({}, 0), ({"shard_gradients": True}, 0), (WEIGHTS, 4 << 30), (WEIGHTS, 20_000), (WEIGHTS, 1), (WHOLE, 1)],
)
def test_two_ranks_draw_the_bits_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: dict[str, Any], drawn_together: int
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(worker_setup, "DRAWN_TOGETHER", drawn_together)
    one = drawn(tmp_path / "one")
    two = drawn(tmp_path / "two", ranks_per_gpu=2, per_device_train_batch_size=1, **parts)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    values = torch.tensor([-0.3, -0.1, 0.1, 0.3])
    assert torch.equal(one["experts.weight"], values[:, None].expand(EXPERTS, 16))
    assert -4.7 < one["router.weight"].min() < 0 < one["router.weight"].max() < 2.8
