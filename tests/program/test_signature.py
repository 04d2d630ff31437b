"""Op.signature: what cost, scratch and kernel of an op depend on is computed once for all blocks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from surogate_core.api import Op, Value


def relu(block: int, **attrs: Any) -> Op:
    x, y = (Value(f"{block}.{name}", (4, 8), "bf16", "act", name, block) for name in ("x", "y"))
    return Op("relu", (x,), (y,), attrs, block=block, where=f"model.py:{block}")


def test_ops_of_two_blocks_have_the_same_signature() -> None:
    assert relu(0, slope=0.1).signature is relu(1, slope=0.1).signature


@pytest.mark.parametrize(
    "change",
    [
        {"kind": "gelu"},
        {"attrs": {"slope": 0.2}},
        {"phase": "recompute"},
        {"lane": "comm"},
        {"accumulate": frozenset({0})},
        {"ins": (Value("x", (8, 4), "bf16", "act"),)},
        {"ins": (Value("x", (4, 8), "fp32", "act"),)},
        {"ins": (Value("x", (4, 8), "bf16", "param"),)},
        {"ins": (), "outs": (Value("x", (4, 8), "bf16", "act"), Value("y", (4, 8), "bf16", "act"))},
    ],
)
def test_a_change_that_a_kernel_may_notice_changes_the_signature(change: dict[str, Any]) -> None:
    op = relu(0, slope=0.1)
    assert replace(op, **change).signature is not op.signature


def test_an_op_with_an_attr_that_cannot_be_hashed_has_a_signature_of_its_own() -> None:
    first, second = relu(0, slopes=[0.1]), relu(1, slopes=[0.1])
    assert first.signature is first.signature
    assert first.signature is not second.signature
