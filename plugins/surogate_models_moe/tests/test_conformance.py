"""The suite for plugins knows products of groups that add a bias, which no tiny run of a family has yet."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_conformance.bench import Sample
from surogate_conformance.kinds.ops import (
    the_product_that_it_declares_is_what_it_computes,
    what_it_declares_of_its_inputs_and_outputs_holds,
)
from surogate_core.api import Op, OpDef, Value
from surogate_core.testing.ops import as_inputs
from surogate_models_moe import reference
from surogate_models_moe.ops import OPS

GROUPED = next(definition for definition in OPS if definition.kind == "grouped_linear")


def biased_by_the_next(x: Tensor, w: Tensor, ends: Tensor, bias: Tensor | None = None) -> Tensor:
    """Each expert has the bias of the next one."""
    return reference.grouped_linear(x, w, ends, None if bias is None else bias.roll(1, 0))


def bench(definition: OpDef, *, biased: bool) -> Any:
    ins = [
        torch.randn(7, 6),
        torch.randn(3 * 4, 6),
        torch.tensor([2, 2, 7]).int(),
        *([torch.randn(3, 4)] if biased else []),
    ]
    values = tuple(as_inputs(ins))
    outs = tuple(Value(s.label, s.shape, s.dtype, "act") for s in definition.infer(values, {}))
    sample = Sample(Op(definition.kind, values, outs, phase="forward"), tuple(ins), (True,), True)
    subject = SimpleNamespace(examples=lambda definition: [])
    registry = SimpleNamespace(ops={definition.kind: definition})
    return SimpleNamespace(
        sample_ops=lambda: None, samples={definition.kind: [sample]}, subject=subject, registry=registry
    )


@pytest.mark.parametrize("biased", [False, True])
def test_a_product_of_groups_is_compared_with_the_bias_of_each_group(biased: bool) -> None:
    given = bench(GROUPED, biased=biased)
    the_product_that_it_declares_is_what_it_computes(GROUPED, given)
    what_it_declares_of_its_inputs_and_outputs_holds(GROUPED, given)


def test_a_bias_of_another_group_and_a_kind_of_no_input_are_found() -> None:
    wrong = replace(GROUPED, reference=f"{__name__}:biased_by_the_next")
    with pytest.raises(AssertionError, match=r"its reference is off by .* from the forward product"):
        the_product_that_it_declares_is_what_it_computes(wrong, bench(wrong, biased=True))
    wrong = replace(GROUPED, param_kinds={4: "vector"})
    with pytest.raises(AssertionError, match="param_kinds names input 4, but it has 3 inputs"):
        what_it_declares_of_its_inputs_and_outputs_holds(wrong, bench(wrong, biased=False))
