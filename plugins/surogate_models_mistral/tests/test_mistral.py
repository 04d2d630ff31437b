"""Windows of Mistral and Ministral. Parity with transformers, exports and refused keys are tested for all families."""

from __future__ import annotations

from typing import Any

import pytest
from models.harness import MODELS, plan_inputs, tiny_config

from surogate_core.assembly.assemble import assemble

LAYERS = ["full_attention", "sliding_attention"] * 2


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        ({"model_type": "mistral"}, (4096,) * 4),
        ({"model_type": "mistral", "sliding_window": None}, (0,) * 4),
        ({"model_type": "mistral", "sliding_window": 6, "layer_types": ["sliding_attention"] * 4}, (6,) * 4),
        ({"model_type": "ministral", "sliding_window": 6}, (6,) * 4),
        ({"model_type": "ministral", "sliding_window": 6, "layer_types": LAYERS}, (0, 6, 0, 6)),
        ({"model_type": "ministral", "sliding_window": None}, (0,) * 4),
    ],
    ids=str,
)
def test_every_layer_has_the_window_of_transformers(config: dict[str, Any], windows: tuple[int, ...]) -> None:
    assert MODELS[config["model_type"]].dims(tiny_config(**config)).windows == windows


def test_rows_that_are_not_longer_than_the_window_have_none() -> None:
    """Kernels for full rows without a window are faster, and the result is the same."""
    config = tiny_config(model_type="ministral", sliding_window=16, layer_types=LAYERS)
    for seq_len, windows in ((16, [0] * 4), (17, [0, 16, 0, 16])):
        program = assemble(plan_inputs(config, seq_len=seq_len)).programs["micro_first"]
        for kind, found in (("attention", windows), ("attention_bwd", windows[::-1])):
            assert [op.attrs["window"] for op in program.ops if op.kind == kind] == found
