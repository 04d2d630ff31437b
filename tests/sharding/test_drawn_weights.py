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

STILL = {"learning_rate": 0, "weight_decay": 0, "max_steps": 1}


def drawn(folder: Path, **keys: Any) -> dict[str, Tensor]:
    folder.mkdir()
    done = run.train(run.load(write_config(folder, **STILL, **keys)), notice=lambda line: None)
    return load_file(done.output_dir / "model.safetensors")


@pytest.mark.parametrize("parts", [{}, {"shard_gradients": True}, {"shard_weights": True}])
def test_two_ranks_draw_the_bits_of_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, parts: dict[str, bool]
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    one = drawn(tmp_path / "one")
    two = drawn(tmp_path / "two", ranks_per_gpu=2, per_device_train_batch_size=1, **parts)
    assert one.keys() == two.keys() and all(torch.equal(one[name], two[name]) for name in one)
    values = torch.tensor([-0.3, -0.1, 0.1, 0.3])
    assert torch.equal(one["experts.weight"], values[:, None].expand(EXPERTS, 16))
    assert -4.7 < one["router.weight"].min() < 0 < one["router.weight"].max() < 2.8
