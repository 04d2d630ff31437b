"""What tests of ops and kernels are written with: `check_op` detects what is wrong with the reference of an op."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from torch import Tensor

from surogate_core.api import Op, OpDef, OutSpec, RowWise, Value
from surogate_core.plugins.discovery import load_registry
from surogate_core.testing import binding
from surogate_core.testing.kernels import assert_same_values
from surogate_core.testing.ops import check_op


def as_op(monkeypatch: pytest.MonkeyPatch, reference: object) -> OpDef:
    """Return an op whose one output has the shape and dtype of its one input."""
    module = ModuleType("made_up_reference")
    module.f = reference  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "made_up_reference", module)
    return OpDef(
        kind="made_up",
        infer=lambda ins, attrs: [OutSpec("y", ins[0].shape, ins[0].dtype)],
        reference="made_up_reference:f",
    )


def through_numpy(x: Tensor) -> Tensor:
    """Write to the input in a way that torch's version counters do not detect."""
    y = x.clone()
    x.numpy()[0] = 7
    return y


def test_a_correct_op_returns_its_outputs() -> None:
    x, w = torch.randn(5, 8), torch.randn(8)
    y, rstd = check_op(load_registry().ops["rmsnorm"], x, w, eps=1e-6)
    expected = torch.rsqrt(x.square().mean(-1) + 1e-6)
    torch.testing.assert_close(rstd, expected)
    torch.testing.assert_close(y, x * expected[:, None] * w)


@pytest.mark.parametrize(
    ("reference", "message"),
    [
        (lambda x: x.mul_(2), "wrote to input 0"),
        (through_numpy, "wrote to input 0"),
        (lambda x: (x.data.add_(1), x.clone())[1], "wrote to input 0"),
        (lambda x: x[:1], r"y is \(\(1,\), torch.float32\), but \(\(4,\), torch.float32\) in the shape rule"),
        (lambda x: x.double(), "torch.float64"),
        (lambda x: (x, x), "2 outputs, but 1 in the shape rule"),
        (lambda x: torch.rand(4), "a second call changes y"),
    ],
)
def test_a_wrong_reference_is_detected(monkeypatch: pytest.MonkeyPatch, reference: object, message: str) -> None:
    with pytest.raises(AssertionError, match=message):
        check_op(as_op(monkeypatch, reference), torch.ones(4))


@pytest.mark.parametrize("special", [0.0, torch.nan, torch.inf])
def test_rows_of_an_op_that_computes_each_by_itself_are_compared(
    monkeypatch: pytest.MonkeyPatch, special: float
) -> None:
    """Also where others are not finite. An op that has rows by what it takes alone is not compared."""
    x = torch.tensor([1.0, 2.0, special, 4.0])

    def row_wise(definition: OpDef, **fields: object) -> OpDef:
        return replace(definition, row_wise=lambda op: RowWise(**{"ins": (0,), "outs": (0,)} | fields))

    check_op(row_wise(as_op(monkeypatch, lambda x: x + 1)), x)
    by_sum = as_op(monkeypatch, lambda x: x + x.where(x.isfinite(), 0).sum())
    with pytest.raises(AssertionError, match="row_wise: y of rows 0 to 1 and 1 to 4 is not that of all"):
        check_op(row_wise(by_sum), x)
    check_op(row_wise(by_sum, ins=(), outs=(), local=(0,), takes=(0,)), x)


def test_a_positioned_op_and_no_other_has_a_reference_that_takes_firsts(monkeypatch: pytest.MonkeyPatch) -> None:
    with_firsts = as_op(monkeypatch, lambda x, *, firsts=(): x.clone())
    check_op(replace(with_firsts, positioned=True), torch.ones(4))
    with pytest.raises(AssertionError, match=r"attributes \{\}, but its reference has \{'firsts'"):
        check_op(with_firsts, torch.ones(4))
    without = as_op(monkeypatch, lambda x: x.clone())
    with pytest.raises(AssertionError, match="made_up is positioned, but its reference has no keyword firsts"):
        check_op(replace(without, positioned=True), torch.ones(4))


def test_values_are_the_same_if_all_but_the_bits_of_nan_are() -> None:
    codes = torch.tensor([1, 2], dtype=torch.uint8)
    nans = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    assert_same_values([codes, nans], [codes.clone(), nans.flip(0)])
    for a, b in ((codes, codes + 1), (torch.tensor([0.0]), torch.tensor([-0.0])), (nans, torch.zeros(2))):
        with pytest.raises(AssertionError, match="output 1"):
            assert_same_values([codes, a], [codes, b])


def test_the_outputs_of_an_op_are_those_of_its_shape_rule(monkeypatch: pytest.MonkeyPatch) -> None:
    """`run_op` without a GPU: the reference takes the place of the kernel."""
    rmsnorm = load_registry().ops["rmsnorm"]

    def by_reference(kernels: object, op: Op, contents: Mapping[Value, Tensor]) -> list[Tensor]:
        assert [out.dtype for out in op.outs] == ["fp32", "fp32"]
        return list(check_op(rmsnorm, *(contents[value] for value in op.ins), **op.attrs))

    monkeypatch.setattr(binding, "run_kernel", by_reference)
    x, w = torch.randn(5, 64), torch.randn(64)
    found = binding.run_op((), rmsnorm, [x, w], {"eps": 1e-6})
    assert_same_values(found, check_op(rmsnorm, x, w, eps=1e-6))
