"""Which sizes of heads the kernels of sinks serve. Needs no GPU."""

from __future__ import annotations

from dataclasses import replace

import pytest

from surogate_core.api import Op, Target, Value
from surogate_core.testing.binding import choose
from surogate_core.testing.devices import DEVICES
from surogate_models_gptoss.kernels import KERNELS, _workspace
from surogate_models_gptoss.ops import OPS

ADD, GRADIENT = OPS


def ops(dim: int) -> list[Op]:
    """Return both ops, of 300 tokens and 4 heads."""
    attrs = {"n_heads": 4, "n_kv_heads": 2, "head_dim": dim, "seq_len": 300, "window": 128}
    qkv, out = (Value(name, (300, width), "bf16", "act") for name, width in (("qkv", 8 * dim), ("out", 4 * dim)))
    bounds = Value("bounds", (3,), "int32", "act")
    lse, sinks = Value("lse", (4, 300), "fp32", "act"), Value("sinks", (4,), "bf16", "param")
    found = []
    for definition, ins, given in (
        (ADD, (qkv, bounds, out, lse, sinks), attrs),
        (GRADIENT, (out, out, lse, sinks), {}),
    ):
        outs = [Value(s.label, s.shape, s.dtype, "act") for s in definition.infer(ins, given)]
        found.append(Op(definition.kind, ins, tuple(outs), given))
    return found


@pytest.mark.parametrize("device", ["h100", "rtx4090", "a100", "b200"])
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_heads_of_usual_sizes_have_kernels_on_every_gpu(dim: int, device: str) -> None:
    for op in ops(dim):
        assert choose(KERNELS, op, Target(DEVICES[device])).op == op.kind
    assert _workspace(ops(dim)[1], Target(DEVICES[device])) == 2 * 4 * 4


def test_gradients_are_added_in_fp32_and_written_in_bf16() -> None:
    h100, gradient = Target(DEVICES["h100"]), ops(64)[1]
    bf16 = replace(gradient, outs=(replace(gradient.outs[0], dtype="bf16"),))
    for served in (gradient, replace(gradient, accumulate=frozenset({0})), bf16):
        assert choose(KERNELS, served, h100).op == GRADIENT.kind
    with pytest.raises(AssertionError, match="cannot accumulate into its outputs"):
        choose(KERNELS, replace(bf16, accumulate=frozenset({0})), h100)


def test_another_size_of_heads_is_refused_by_its_value() -> None:
    for op in ops(96):
        with pytest.raises(AssertionError, match="heads must have 64, 128 or 256 elements, got 96"):
            choose(KERNELS, op, Target(DEVICES["h100"]))
