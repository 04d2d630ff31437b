from __future__ import annotations

import pytest
import torch
from acme_plugin.plugin import ZERO, parts, read

from surogate_core.api import ConfigError, HFTensor

TENSOR = HFTensor("x.weight", (8, 64))


def test_a_weight_is_its_code_times_the_scale_of_its_row() -> None:
    codes = torch.arange(8 * 64).reshape(8, 64).remainder(256).to(torch.uint8)
    scales = torch.linspace(0.1, 0.8, 8)
    found = read(TENSOR, {"x.weight": codes, "x.weight_scale": scales}, range(2, 5), {})
    assert torch.equal(found, (codes.float() - ZERO)[2:5] * scales[2:5, None])


def test_a_vector_is_not_stored_in_it() -> None:
    assert [part.name for part in parts(TENSOR, {})] == ["x.weight", "x.weight_scale"]
    with pytest.raises(ConfigError, match="only matrices"):
        parts(HFTensor("norm.weight", (8,)), {})
