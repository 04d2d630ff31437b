"""The ops `lm_head_tokens*` that the compiled LM head supports, and their workspaces. Needs no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from surogate_core.api import KernelDef, Op, Target, Value
from surogate_core.testing.devices import DEVICES
from surogate_recipes_bf16.kernels.token_loss import KERNELS

H200 = Target(DEVICES["h200"])
T, C, V, CHUNKS = 512, 64, 1024, 4


def head(kind: str, dtype: str = "bf16", dw_dtype: str = "fp32") -> Op:
    def value(name: str, dtype: str, *shape: int) -> Value:
        return Value(name=name, shape=shape, dtype=dtype, role="act")

    ins = (value("x", dtype, T, C), value("w", dtype, V, C), value("targets", "int32", T))
    rows = tuple(value(f"row{i}", "fp32", T) for i in range(4))
    grads = (value("dx", dtype, T, C), value("dw", dw_dtype, V, C))
    if kind == "lm_head_tokens":
        return Op(kind, ins, rows[:3], {"chunks": CHUNKS})
    return Op(kind, (*ins, *rows), grads[: 2 if kind.endswith("bwd") else 1], {"chunks": CHUNKS})


def serving(op: Op) -> list[KernelDef]:
    dtypes = tuple(v.dtype for v in (*op.ins, *op.outs))
    return [k for k in KERNELS if k.op == op.kind and k.dtypes == dtypes and k.supports(op, H200).ok]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("kind", ["lm_head_tokens", "lm_head_tokens_dgrad", "lm_head_tokens_bwd"])
def test_exactly_one_kernel_serves_each_op_and_none_adds_to_the_gradient_of_x(kind: str, dtype: str) -> None:
    op = head(kind, dtype)
    assert len(serving(op)) == 1
    assert not serving(replace(op, accumulate=frozenset({0})))


def test_workspace_grows_with_the_gradients_computed() -> None:
    """dx takes a chunk of rows in bf16, and a bf16 dw its fp32 sum over the chunks. An fp32 dw is summed in place."""
    kinds = ("lm_head_tokens", "lm_head_tokens_dgrad", "lm_head_tokens_bwd")
    forward, dx, dw = (serving(op)[0].workspace(op, H200) for op in map(head, kinds))
    assert (dx - forward, dw - dx) == (T // CHUNKS * C * 2, 0)
    rounded = head("lm_head_tokens_bwd", dw_dtype="bf16")
    assert serving(rounded)[0].workspace(rounded, H200) - dx == 4 * V * C
