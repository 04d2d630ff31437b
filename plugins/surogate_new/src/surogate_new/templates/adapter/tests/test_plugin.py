from __future__ import annotations

from pathlib import Path

import pytest
import torch
from acme_plugin.plugin import FACTORS, SCALE, load, merge, save

from surogate_core.api import ConfigError, NoOptions
from surogate_core.testing.ops import check_op


def test_each_output_has_a_factor() -> None:
    y = torch.tensor([[1.0, 2.0], [3.0, 4.0]], dtype=torch.bfloat16)
    (scaled,) = check_op(SCALE, y, torch.tensor([1.0, 0.5]))
    assert scaled.tolist() == [[1.0, 1.0], [3.0, 2.0]]


def test_what_is_saved_is_loaded_and_merged_into_the_rows_of_the_weight(tmp_path: Path) -> None:
    save({f"down.weight{FACTORS}": torch.tensor([2.0, 3.0])}, tmp_path, "base", NoOptions())
    assert load(tmp_path, NoOptions())[f"down.weight{FACTORS}"].tolist() == [2.0, 3.0]
    merged = merge(tmp_path)
    assert merged.base_model == "base"
    assert merged.changes["down.weight"](torch.ones(2, 3)).tolist() == [[2.0] * 3, [3.0] * 3]


def test_a_folder_without_an_adapter_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has no acme_toy"):
        load(tmp_path, NoOptions())
