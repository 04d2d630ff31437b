"""The ops `lm_head_distill*` that the compiled LM head supports, and their workspaces. Needs no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from surogate_core.api import KernelDef, Op, Target, Value
from surogate_core.testing.devices import DEVICES
from surogate_recipes_bf16.kernels.distillation import KERNELS, MOST_TOKENS

H200 = Target(DEVICES["h200"])
T, C, V, CHUNKS = 512, 64, 10_000, 4


def head(outputs: int, dtype: str = "bf16", k: int = 32) -> Op:
    """The op with the figures, and with the gradients of x and w."""

    def value(name: str, dtype: str, *shape: int) -> Value:
        return Value(name=name, shape=shape, dtype=dtype, role="act")

    ins = (value("x", dtype, T, C), value("w", dtype, V, C), value("targets", "int32", T), value("ids", "int32", T, k))
    ins = (*ins, value("log_probs", "fp32", T, k + 1), value("loss_scale", "fp32"))
    figures = tuple(value(name, "fp32") for name in ("loss", "cross_entropy", "divergence"))
    outs = (*figures, value("dx", dtype, T, C), value("dw", "fp32", V, C))[:outputs]
    attrs = {"chunks": CHUNKS, "weight": 0.5, "temperature": 1.0, "reverse": False}
    wrt = {"wrt": (0, 1)[: outputs - 3]} if outputs > 3 else {}
    return Op("lm_head_distill_grads" if wrt else "lm_head_distill", ins, outs, attrs | wrt)


def serving(op: Op) -> list[KernelDef]:
    dtypes = tuple(v.dtype for v in (*op.ins, *op.outs))
    return [k for k in KERNELS if k.op == op.kind and k.dtypes == dtypes and k.supports(op, H200).ok]


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("outputs", [3, 4, 5])
def test_exactly_one_kernel_serves_each_op_and_what_it_does_not_do_is_refused(outputs: int, dtype: str) -> None:
    op = head(outputs, dtype)
    assert len(serving(op)) == len(serving(replace(op, accumulate=frozenset({0, 1, 2})))) == 1
    assert not serving(replace(op, accumulate=frozenset({0})))
    assert not serving(head(outputs, dtype, k=MOST_TOKENS + 1))


def test_workspace_grows_with_the_gradient_of_x() -> None:
    """dx takes a chunk of rows in bf16. An fp32 dw is summed in place."""
    forward, dx, dw = (serving(op)[0].workspace(op, H200) for op in map(head, (3, 4, 5)))
    assert (dx - forward, dw - dx) == (T // CHUNKS * C * 2, 0)
