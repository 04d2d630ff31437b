"""Which kernel serves which product and route on which device. Needs no GPU."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from surogate_core.api import KernelDef, Op, Target, Value
from surogate_core.testing.binding import choose, refusal
from surogate_core.testing.devices import DEVICES
from surogate_models_moe.kernels import KERNELS, biases, grouped, rows
from surogate_models_moe.ops import OPS

DEFINITIONS = {definition.kind: definition for definition in OPS}


def op(kind: str, *ins: tuple[str, tuple[int, ...]], accumulate: bool = False, **attrs: Any) -> Op:
    values = tuple(Value(f"in{i}", shape, dtype, "act") for i, (dtype, shape) in enumerate(ins))
    specs = DEFINITIONS[kind].infer(values, attrs)
    outs = tuple(Value(spec.label, spec.shape, spec.dtype, "grad") for spec in specs)
    return Op(kind, values, outs, attrs, accumulate=frozenset({0} if accumulate else ()))


def products(n: int = 48, k: int = 40, experts: int = 3) -> list[Op]:
    x, dy, w, ends = ("bf16", (8, k)), ("bf16", (8, n)), ("bf16", (experts * n, k)), ("int32", (experts,))
    return [
        op("grouped_linear", x, w, ends),
        op("grouped_linear_dgrad", dy, w, ends),
        *(op("grouped_linear_wgrad", dy, x, ends, accumulate=accumulate) for accumulate in (False, True)),
        rounded(op("grouped_linear_wgrad", dy, x, ends)),
    ]


def sums(terms: int) -> list[Op]:
    rows, w, base = ("bf16", (8, terms)), ("bf16", (3 * 24, terms)), ("bf16", (8, 24))
    ends, transposed = ("int32", (3,)), ("bf16", (3 * terms, 24))
    return [op("grouped_linear_add", rows, w, ends, base), op("grouped_linear_dgrad_add", rows, transposed, ends, base)]


def rounded(gradient: Op) -> Op:
    """Return an op whose gradient is bf16, as `param_grad_dtype: bf16` makes it."""
    return replace(gradient, outs=(replace(gradient.outs[0], dtype="bf16"),))


def added(gradient: Op) -> Op:
    return replace(gradient, accumulate=frozenset({0}))


@pytest.mark.parametrize(
    ("device", "kernels"), [("h100", "CUTLASS"), ("a100", "PORTABLE"), ("b200", "PORTABLE"), ("rtx4090", "PORTABLE")]
)
def test_products_are_by_cutlass_on_an_sm90_alone(device: str, kernels: str) -> None:
    for product in products():
        assert choose(KERNELS, product, Target(DEVICES[device])) in getattr(grouped, kernels)


@pytest.mark.parametrize("device", ["h100", "rtx4090"])
@pytest.mark.parametrize("kind", ["grouped_linear_part", "grouped_linear_dgrad_pair_part"])
def test_products_of_some_experts_are_written_in_the_place_of_a_base_alone(kind: str, device: str) -> None:
    base, x, w, ends = ("bf16", (8, 48)), ("bf16", (8, 40)), ("bf16", (96, 40)), ("int32", (3,))
    ins = [base, x, w, ends, ("bf16", (3, 48))]
    if "dgrad" in kind:
        ins = [x, base, w, ends, ("bf16", (8, 16)), ("bf16", (48, 40))]
    part = op(kind, *ins, first=1)
    part = replace(part, outs=(replace(part.outs[0], role="act"),))
    target = Target(DEVICES[device])
    assert choose(KERNELS, replace(part, in_place={0: 0}), target) in grouped.PARTS
    with pytest.raises(AssertionError, match="writes some rows, in the place of a base alone"):
        choose(KERNELS, part, target)


@pytest.mark.parametrize("device", ["h100", "rtx4090"])
def test_products_of_narrow_weights_have_a_kernel_of_their_own(device: str) -> None:
    """Whose result has few columns, or is a gradient of weights that are narrow on either side."""
    for product in products(n=32) + products(k=32):
        narrow = product.kind.endswith("wgrad") or product.outs[0].shape[1] == 32
        assert (choose(KERNELS, product, Target(DEVICES[device])) in grouped.NARROW) == narrow


@pytest.mark.parametrize(("device", "kernels"), [("h100", "ONE_KERNEL"), ("rtx4090", "TWO_KERNELS")])
def test_sums_of_products_are_one_kernel_on_an_sm90_alone(device: str, kernels: str) -> None:
    for product, total in zip(products(n=24, k=24), sums(16), strict=False):
        pair = op(f"{product.kind}_pair", *((v.dtype, v.shape) for v in (*product.ins, *total.ins[:2])))
        assert choose(KERNELS, pair, Target(DEVICES[device])) in getattr(grouped, kernels)


@pytest.mark.parametrize("device", ["h100", "rtx4090"])
def test_products_of_few_terms_add_to_a_base_on_every_gpu(device: str) -> None:
    for total in sums(64):
        assert choose(KERNELS, total, Target(DEVICES[device])) in grouped.THIN


@pytest.mark.parametrize("logits", ["bf16", "fp32"])
def test_what_is_reported_of_routers_is_added_up_by_a_kernel(logits: str) -> None:
    """Of the first layer, and of others, in the last of which micro-steps add to the sums of the step."""
    ins, table = [(logits, (8, 6)), ("int32", (8, 2)), ("int32", (8,))], ("fp32", (3, 7))
    for before, accumulate in (([], False), ([table], False), ([table], True)):
        load = op("router_load", *ins, *before, accumulate=accumulate, layer=2, layers=3)
        assert choose(KERNELS, load, Target(DEVICES["rtx4090"])).op == "router_load"


GROUPS: dict[str, Any] = {"k": 2, "normalize": True, "scoring": "sigmoid", "chosen_groups": 1}


@pytest.mark.parametrize("logits", ["bf16", "fp32"])
@pytest.mark.parametrize("bias", [[], [("fp32", (64,))]])
def test_routes_by_sigmoids_have_a_kernel(logits: str, bias: list[Any]) -> None:
    h100, ins = Target(DEVICES["h100"]), (logits, (4, 64))
    for attrs in ({}, {"epsilon": 1e-20, "scale": 2.5}):
        given = op("route", ins, *bias, **GROUPS | {"groups": 8}, **attrs)
        assert "scoring" in choose(KERNELS, given, h100).attrs
        undone = {"normalize": True, "scoring": "sigmoid", **attrs}
        back = op("route_bwd", ("fp32", (4, 2)), ins, ("int32", (4, 2)), **undone)
        assert "scoring" in choose(KERNELS, back, h100).attrs
    plain = op("route", ins, k=2, normalize=True)
    assert "scoring" not in choose(KERNELS, plain, h100).attrs


def test_what_a_kernel_does_not_serve_is_named() -> None:
    h100 = Target(DEVICES["h100"])
    experts = "int32", (4, 17)
    for wrong, message in (
        *((product, "widths must be multiples of 8, got 12") for product in products(n=12)),
        (op("grouped_linear", *((v.dtype, v.shape) for v in products()[0].ins), accumulate=True), "cannot accumulate"),
        (added(products()[-1]), "cannot accumulate"),
        *((total, "widths must be multiples of 8, got 12") for total in sums(12)),
        *((total, "at most 64 terms, got 72") for total in sums(72)),
        (op("route", ("bf16", (4, 513)), k=8, normalize=True), "at most 512 experts, got 513"),
        (op("route", ("bf16", (4, 66)), **GROUPS | {"groups": 33}), "at most 32 groups of experts, got 33"),
        (op("route", ("bf16", (4, 64)), k=17, normalize=True), "at most 16 experts a token, got 17"),
        (op("expert_order", experts, n_experts=64), "at most 16 experts a token, got 17"),
    ):
        with pytest.raises(AssertionError, match=message):
            choose(KERNELS, wrong, h100)


ROUTED = [("bf16", (8, 16))], {"k": 2, "normalize": True}
BIASED = [("bf16", (8, 40)), ("bf16", (3 * 48, 40)), ("int32", (3,))]
GATED = [("bf16", (8, 48)), ("fp32", (4, 2)), ("int32", (8,))]


def refused(kernels: list[KernelDef], op: Op, message: str) -> None:
    """Every kernel refuses the op, and those of its dtypes for this reason, or because they are of sigmoids alone."""
    reasons = [refusal(kernel, DEFINITIONS[op.kind], op, Target(DEVICES["h100"])) for kernel in kernels]
    others = ("supports dtypes", "only scoring='sigmoid'")
    assert all(reasons) and {message} == {reason for reason in reasons if not reason.startswith(others)}


@pytest.mark.parametrize(
    ("given", "further", "attrs", "message"),
    [
        (("route", *ROUTED), [("fp32", (16,))], {}, "does not take bias"),
        (("route", *ROUTED), [], {"scale": 2.5}, "does not implement scale=2.5"),
        (("route", *ROUTED), [], {"epsilon": 1e-20}, "does not implement epsilon=1e-20"),
        (("route", *ROUTED), [], {"groups": 4, "chosen_groups": 2}, "does not implement groups=4, chosen_groups=2"),
    ],
    ids=str,
)
def test_no_kernel_takes_what_it_does_not_compute(
    given: tuple[str, list[Any], dict[str, Any]], further: list[Any], attrs: dict[str, Any], message: str
) -> None:
    """Without it, a kernel serves the op. Backward ops are refused for the same attributes."""
    kind, ins, plain = given
    h100, kernels = Target(DEVICES["h100"]), [kernel for kernel in KERNELS if kernel.op == kind]
    assert choose(KERNELS, op(kind, *ins, **plain), h100) in kernels
    wanted = op(kind, *ins, *further, **plain, **attrs)
    refused(kernels, wanted, message)
    if not attrs or not attrs.keys() <= DEFINITIONS["route_bwd"].attrs.keys():
        return
    before, after = [("fp32", (8, 2))], [("int32", (8, 2))]
    undone = op("route_bwd", *before, *ins, *after, **{k: v for k, v in (plain | attrs).items() if k != "k"})
    refused([kernel for kernel in KERNELS if kernel.op == "route_bwd"], undone, message)


@pytest.mark.parametrize("attrs", [{"alpha": 1.702}, {"limit": 7.0}, {"offset": 1.0}, {"interleaved": True}], ids=str)
def test_gates_of_families_have_a_kernel_of_their_own(attrs: dict[str, Any]) -> None:
    """Plain SwiGLU has another one."""
    h100 = Target(DEVICES["h100"])
    for kind, before in (("weighted_swiglu", []), ("weighted_swiglu_bwd", [("bf16", (8, 24))])):
        assert choose(KERNELS, op(kind, *before, *GATED, **attrs), h100) in rows.GATES
        assert choose(KERNELS, op(kind, *before, *GATED), h100) in rows.OTHERS


@pytest.mark.parametrize(("device", "kernel"), [("h100", "BIASED_CUTLASS"), ("rtx4090", "BIASED_PORTABLE")])
def test_products_that_add_a_bias_have_kernels(device: str, kernel: str) -> None:
    biased = op("grouped_linear", *BIASED, ("bf16", (3, 48)))
    assert choose(KERNELS, biased, Target(DEVICES[device])) is getattr(grouped, kernel)


def test_biases_of_experts_have_kernels_that_add_gradients_in_fp32_and_write_them_in_bf16() -> None:
    h100, y, experts, bias = Target(DEVICES["h100"]), ("bf16", (8, 24)), ("int32", (8, 2)), ("bf16", (3, 24))
    gradients = (
        op("expert_bias_grad", y, ("fp32", (8, 2)), experts, n_experts=3),
        op("grouped_linear_bgrad", y, ("int32", (3,))),
    )
    for wanted in (
        op("add_expert_bias", y, ("fp32", (8, 2)), experts, bias),
        op("expert_bias_dgrad", y, experts, bias),
        *(added(gradient) for gradient in gradients),
        *(rounded(gradient) for gradient in gradients),
    ):
        assert choose(KERNELS, wanted, h100) in biases.KERNELS
    for gradient in gradients:
        with pytest.raises(AssertionError, match="cannot accumulate into its outputs"):
            choose(KERNELS, added(rounded(gradient)), h100)
    many = op("expert_bias_dgrad", y, ("int32", (8, 17)), bias)
    with pytest.raises(AssertionError, match="at most 16 experts a token, got 17"):
        choose(KERNELS, many, h100)


def test_the_gate_of_a_shared_expert_has_kernels_for_rows_of_whole_words() -> None:
    h100, gate = Target(DEVICES["h100"]), ("bf16", (8, 1))
    for kind, before in (("gate_rows", []), ("gate_rows_bwd", [("bf16", (8, 48))])):
        assert choose(KERNELS, op(kind, *before, ("bf16", (8, 48)), gate), h100).op == kind
        odd = [(dtype, (8, 44)) for dtype, _ in before]
        with pytest.raises(AssertionError, match="widths must be multiples of 8, got 44"):
            choose(KERNELS, op(kind, *odd, ("bf16", (8, 44)), gate), h100)
