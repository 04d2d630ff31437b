from __future__ import annotations

from pathlib import Path

import pytest
import torch
from acme_plugin.plugin import ROUND

from surogate import run
from surogate_core.testing.ops import check_op

ROOT = Path(__file__).parents[1]


def test_numbers_are_rounded_to_four_significant_bits_below_the_largest() -> None:
    (y,) = check_op(ROUND, torch.tensor([448.0, 17.0, -19.0, 0.0]))
    assert y.tolist() == [448.0, 16.0, -20.0, 0.0]


def test_forward_products_of_blocks_read_rounded_operands(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    program = run.plan(run.load("example/run.yaml"), device="h100").assembly.all_programs["micro_first"]
    made = {value: op.kind for op in program.ops for value in op.outs}
    for op in program.ops:
        operands = {made.get(value) for value in op.ins[:2]}
        if op.kind == "linear" and op.block >= 0:
            assert operands == {"acme_toy_round"}
        if op.kind in ("linear_dgrad", "linear_wgrad") and op.block >= 0:
            assert "acme_toy_round" not in operands
