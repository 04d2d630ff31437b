from __future__ import annotations

from pathlib import Path

import pytest
import torch
from acme_plugin.plugin import ADDED, load, merge, save

from surogate_core import run
from surogate_core.api import ConfigError, NoOptions

ROOT = Path(__file__).parents[1]


def test_only_the_added_matrices_are_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    planned = run.plan(run.load("example/run.yaml", ["model=example/model"]), device="h100")
    added = [param for param in planned.assembly.trainable if param.name.endswith(ADDED)]
    assert len(added) == len(planned.assembly.trainable) == 2 * 2  # o and down of two blocks


def test_what_is_saved_is_loaded_and_added_to_the_weight(tmp_path: Path) -> None:
    save({f"down.weight{ADDED}": torch.tensor([[2.0, 3.0]])}, tmp_path, "base", NoOptions())
    assert load(tmp_path, NoOptions())[f"down.weight{ADDED}"].tolist() == [[2.0, 3.0]]
    merged = merge(tmp_path)
    assert merged.base_model == "base"
    assert merged.changes["down.weight"](torch.ones(1, 2)).tolist() == [[3.0, 4.0]]


def test_a_folder_without_an_adapter_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Name the folder of an adapter"):
        load(tmp_path, NoOptions())
