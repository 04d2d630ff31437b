from __future__ import annotations

from pathlib import Path

import pytest
import torch
from acme_plugin.plugin import FACTORS, FORMAT

from surogate import run
from surogate_core.api import ConfigError, NoOptions

ROOT = Path(__file__).parents[1]
MODULE = "model.layers.0.mlp.down_proj"


def test_only_the_factors_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    planned = run.plan(run.load("example/run.yaml", ["model=example/model"]), device="h100")
    factors = [param for param in planned.assembly.trainable if param.name.endswith(FACTORS)]
    assert len(factors) == len(planned.assembly.trainable) == 2 * 2  # o and down of two blocks


def test_what_is_saved_is_loaded_and_scales_the_rows_of_the_weight(tmp_path: Path) -> None:
    FORMAT.save({MODULE + FACTORS: torch.tensor([[2.0], [3.0]])}, tmp_path, "base", NoOptions())
    assert FORMAT.load(tmp_path, NoOptions())[MODULE + FACTORS].tolist() == [[2.0], [3.0]]
    change = FORMAT.merge(tmp_path).changes[f"{MODULE}.weight"]
    assert change(torch.ones(2, 2)).tolist() == [[2.0, 2.0], [3.0, 3.0]]


def test_a_folder_without_an_adapter_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="name the folder that has it"):
        FORMAT.load(tmp_path, NoOptions())
