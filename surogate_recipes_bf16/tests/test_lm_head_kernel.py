"""Which gradients the compiled LM head computes, and the scratch that each costs: decided without a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from surogate_core.api import KernelDef, Op, Target, Value
from surogate_core.memory.devices import DEVICES
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
def test_one_kernel_serves_the_gradients_that_are_wanted(wrt: Sequence[int], dtype: str) -> None:
    assert len(serving(head(wrt, dtype))) == 1


def test_the_gradient_of_the_weight_is_computed_beside_that_of_x_only() -> None:
    assert not serving(head((1,), "fp32"))
    (reason,) = {k.supports(head((1,), "fp32"), H200).reason for k in KERNELS if k.op == "lm_head_ce_grads"}
    assert "not alone" in reason


def test_scratch_grows_with_what_is_computed() -> None:
    """dx a chunk of rows in bf16, a bf16 dw its sum in fp32 over the chunks; an fp32 dw is summed where it belongs."""
    loss, dx, dw = (serving(op)[0].workspace(op, H200) for op in map(head, ((), (0,), (0, 1))))
    assert (dx - loss, dw - dx) == (T // CHUNKS * C * 2, 0)
    rounded = head((0, 1), dw_dtype="bf16")
    assert serving(rounded)[0].workspace(rounded, H200) - dx == 4 * V * C
