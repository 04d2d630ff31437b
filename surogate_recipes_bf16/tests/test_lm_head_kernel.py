"""Gradients that the compiled LM head supports, and the workspace of each. Needs no GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from surogate_core.api import KernelDef, Op, Target, Value
from surogate_core.testing.devices import DEVICES
from surogate_recipes_bf16.kernels.loss import KERNELS

H200 = Target(DEVICES["h200"])
T, C, V, CHUNKS = 512, 64, 1024, 4


def head(wrt: Sequence[int], dtype: str = "bf16", dw_dtype: str = "fp32") -> Op:
    def value(name: str, dtype: str, *shape: int) -> Value:
        return Value(name=name, shape=shape, dtype=dtype, role="act")

    ins = (value("x", dtype, T, C), value("w", dtype, V, C), value("targets", "int32", T), value("scale", "fp32"))
    grads = (value("dx", dtype, T, C), value("dw", dw_dtype, V, C))
    attrs = {"chunks": CHUNKS} | ({"wrt": tuple(wrt)} if wrt else {})
    kind = "lm_head_ce_grads" if wrt else "lm_head_ce"
    return Op(kind, ins, (value("loss", "fp32"), *(grads[i] for i in wrt)), attrs)


def serving(op: Op) -> list[KernelDef]:
    dtypes = tuple(v.dtype for v in (*op.ins, *op.outs))
    return [k for k in KERNELS if k.op == op.kind and k.dtypes == dtypes and k.supports(op, H200).ok]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("wrt", [(), (0,), (0, 1)], ids=str)
def test_exactly_one_kernel_supports_each_set_of_gradients(wrt: Sequence[int], dtype: str) -> None:
    assert len(serving(head(wrt, dtype))) == 1


def test_the_gradient_of_the_weight_requires_that_of_x() -> None:
    assert not serving(head((1,), "fp32"))
    (reason,) = {k.supports(head((1,), "fp32"), H200).reason for k in KERNELS if k.op == "lm_head_ce_grads"}
    assert "without that of x" in reason


def test_workspace_grows_with_the_gradients_computed() -> None:
    """dx takes a chunk of rows in bf16, and a bf16 dw its fp32 sum over the chunks. An fp32 dw is summed in place."""
    loss, dx, dw = (serving(op)[0].workspace(op, H200) for op in map(head, ((), (0,), (0, 1))))
    assert (dx - loss, dw - dx) == (T // CHUNKS * C * 2, 0)
    rounded = head((0, 1), dw_dtype="bf16")
    assert serving(rounded)[0].workspace(rounded, H200) - dx == 4 * V * C
