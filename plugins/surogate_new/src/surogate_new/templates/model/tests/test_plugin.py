from __future__ import annotations

import math
from pathlib import Path

import pytest
from acme_plugin.plugin import Sizes, sizes, weights

from surogate import run
from surogate_core.api import ConfigError

ROOT = Path(__file__).parents[1]


def test_the_params_are_the_weights_of_a_checkpoint(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    assembly = run.plan(run.load("example/run.yaml"), device="h100").assembly
    maps = weights(Sizes(257, 64, 2, 256))
    assert sorted(assembly.params) == sorted(weight.param for weight in maps)
    for weight in maps:
        elements = sum(math.prod(tensor.shape) for tensor in weight.tensors)
        assert assembly.params[weight.param].size == elements


def test_a_config_without_a_size_is_an_error() -> None:
    with pytest.raises(ConfigError, match="hidden_size: must be a whole number"):
        sizes({"vocab_size": 257})
