"""References of the ops against a loop over tokens, and backward rules against autograd, in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from surogate_core.api import Op, ProgramError, Value
from surogate_core.testing.ops import check_op
from surogate_models_moe.ops import MOST_THIN, OPS

KINDS = {definition.kind: definition for definition in OPS}
TOKENS, EXPERTS, K, WIDTH, HIDDEN = 7, 5, 3, 6, 4


def run(kind: str, *ins: Tensor, **attrs: Any) -> tuple[Tensor, ...]:
    return check_op(KINDS[kind], *ins, **attrs)


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)), dtype=torch.float64)


def routes(normalize: bool, used: int = EXPERTS) -> tuple[Tensor, ...]:
    """Return logits, weights, experts, order, place, ends. No token goes to experts from `used` on."""
    logits = draw(TOKENS, EXPERTS)
    logits[:, used:] -= 100
    weights, experts = run("route", logits, k=K, normalize=normalize)
    return logits, weights, experts, *run("expert_order", experts, n_experts=EXPERTS)


@pytest.mark.parametrize("normalize", [False, True])
def test_routes_are_the_largest_shares_of_the_softmax(normalize: bool) -> None:
    logits, weights, experts, *_ = routes(normalize)
    shares, largest = logits.softmax(1).topk(K)
    expected = shares / shares.sum(1, keepdim=True) if normalize else shares
    assert experts.tolist() == largest.tolist() and torch.allclose(weights, expected, rtol=1e-14)
    leaf = logits.clone().requires_grad_()
    taken = leaf.softmax(1).gather(1, largest)
    taken = taken / taken.sum(1, keepdim=True) if normalize else taken
    d_weights = draw(TOKENS, K)
    (expected,) = torch.autograd.grad(taken, leaf, d_weights)
    (gradient,) = run("route_bwd", d_weights, logits, experts, normalize=normalize)
    assert torch.allclose(gradient, expected, rtol=1e-12, atol=1e-15)


def test_of_equal_logits_the_lower_expert_is_first() -> None:
    weights, experts = run("route", torch.tensor([[0.0, 1.0, 1.0, 0.0], [2.0] * 4]).bfloat16(), k=3, normalize=True)
    assert experts.tolist() == [[1, 2, 0], [0, 1, 2]] and weights.dtype == torch.float32


def test_the_load_of_a_router_is_of_the_tokens_with_a_label() -> None:
    """A share of 0 has no entropy. Other layers keep what they have."""
    logits, _, experts, *_ = routes(False)
    logits[2, 0] = -torch.inf
    targets = torch.tensor([1, -100, 0, -100, 3, 2, -100], dtype=torch.int32)
    kept, before = targets >= 0, draw(3, EXPERTS + 1)
    (first,) = run("router_load", logits, experts, targets, layer=1, layers=3)
    (load,) = run("router_load", logits, experts, targets, before, layer=1, layers=3)
    assert not first[[0, 2]].any() and torch.equal(load[[0, 2]], before[[0, 2]]) and torch.equal(load[1], first[1])
    assert load[1, :-1].tolist() == [int((experts[kept] == e).sum()) for e in range(EXPERTS)]
    entropy = torch.special.entr(logits[kept].softmax(1)).sum()
    assert float(load[1, -1]) == pytest.approx(float(entropy))


@pytest.mark.parametrize("used", [EXPERTS, 3])
def test_rows_are_the_slots_in_the_order_of_their_experts(used: int) -> None:
    _, _, experts, order, place, ends = routes(True, used)
    slots = [slot for e in range(EXPERTS) for slot in range(TOKENS * K) if experts.flatten()[slot] == e]
    assert order.tolist() == slots
    assert [slots.index(slot) for slot in range(TOKENS * K)] == place.tolist()
    assert ends.tolist() == [int((experts <= e).sum()) for e in range(EXPERTS)]


@pytest.mark.parametrize("used", [EXPERTS, 3])
def test_a_mixture_and_its_gradients_are_those_of_a_loop_over_tokens(used: int) -> None:
    """Experts without rows have a gradient of zero."""
    _, weights, experts, order, place, ends = routes(False, used)
    leaves = [draw(TOKENS, WIDTH), draw(EXPERTS * 2 * HIDDEN, WIDTH), draw(EXPERTS * WIDTH, HIDDEN), weights]
    x, gate_up, down, weights = leaves = [leaf.requires_grad_() for leaf in leaves]
    tokens = []
    for t in range(TOKENS):
        total = torch.zeros(WIDTH, dtype=torch.float64)
        for j, e in enumerate(experts[t].tolist()):
            gate, up = (gate_up.view(EXPERTS, -1, WIDTH)[e] @ x[t]).chunk(2)
            total = total + weights[t, j] * (down.view(EXPERTS, -1, HIDDEN)[e] @ (F.silu(gate) * up))
        tokens.append(total)
    expected, dy = torch.stack(tokens), draw(TOKENS, WIDTH + 1)[:, 1:].contiguous()
    d_x, d_gate_up, d_down, d_weights = torch.autograd.grad(expected, leaves, dy)

    x, gate_up, down, weights = (leaf.detach() for leaf in leaves)
    (rows,) = run("gather_rows", x, order, place)
    (both,) = run("grouped_linear", rows, gate_up, ends)
    (middle,) = run("weighted_swiglu", both, weights, order)
    (y,) = run("grouped_linear", middle, down, ends)
    assert torch.allclose(run("sum_rows", y, order, place, k=K)[0], expected, rtol=1e-12)

    (dy_rows,) = run("gather_rows", dy, order, place)
    assert torch.allclose(run("grouped_linear_wgrad", dy_rows, middle, ends)[0], d_down, rtol=1e-12)
    (d_middle,) = run("grouped_linear_dgrad", dy_rows, down, ends)
    d_both, ours = run("weighted_swiglu_bwd", d_middle, both, weights, order)
    assert torch.allclose(ours, d_weights, rtol=1e-12)
    assert torch.allclose(run("grouped_linear_wgrad", d_both, rows, ends)[0], d_gate_up, rtol=1e-12)
    (d_rows,) = run("grouped_linear_dgrad", d_both, gate_up, ends)
    assert torch.allclose(run("sum_rows", d_rows, order, place, k=K)[0], d_x, rtol=1e-12)


@pytest.mark.parametrize("kind", ["grouped_linear", "grouped_linear_dgrad"])
def test_products_of_few_terms_take_over_an_addition(kind: str) -> None:
    """A wide one does not: its time is not that of what it writes."""
    *_, ends = routes(True)
    x, w, base = draw(TOKENS * K, HIDDEN), draw(EXPERTS * WIDTH, HIDDEN), draw(TOKENS * K, WIDTH)
    w = w if kind == "grouped_linear" else w.view(EXPERTS, HIDDEN, WIDTH).flatten(0, 1)
    (product,), definition = run(kind, x, w, ends), KINDS[kind]
    assert torch.equal(run(f"{kind}_add", x, w, ends, base)[0], product + base)
    thin = draw(EXPERTS * WIDTH, 3) if kind == "grouped_linear" else draw(EXPERTS * 3, WIDTH)
    branch = draw(TOKENS * K, 3), thin
    expected = product + run(kind, *branch, ends)[0]
    assert torch.equal(run(f"{kind}_pair", x, w, ends, *branch)[0], expected)
    for terms, other in ((MOST_THIN, f"{kind}_add"), (MOST_THIN + 8, "")):
        values = [Value("v", shape, "fp32", "act") for shape in ((8, terms), (EXPERTS * 8, terms))]
        assert definition.rewrites.add_kind(Op(kind, tuple(values), ())) == other


@pytest.mark.parametrize("used", [EXPERTS, 3])
@pytest.mark.parametrize("pair", ["", "_pair"])
@pytest.mark.parametrize("of", ["grouped_linear", "grouped_linear_dgrad"])
def test_products_of_some_experts_after_each_other_are_that_of_all(of: str, pair: str, used: int) -> None:
    *_, ends = routes(True, used)
    kind, rows = f"{of}{pair}", TOKENS * K
    inner, outer = (WIDTH, HIDDEN) if "dgrad" in of else (HIDDEN, WIDTH)
    x, w = draw(rows, inner), draw(EXPERTS * WIDTH, HIDDEN)
    second = draw(EXPERTS * 2, outer) if "dgrad" in of else draw(EXPERTS * outer, 2)
    others = (draw(rows, 2), second) if pair else (draw(EXPERTS, WIDTH),) if of == "grouped_linear" else ()
    (whole,) = run(kind, x, w, ends, *others)
    y, flops = torch.full_like(whole, torch.nan), 0
    for first, count in ((2, 2), (0, 2), (4, 1)):
        some = w[first * WIDTH : (first + count) * WIDTH]
        before, (y,) = y, run(f"{kind}_part", y, x, some, ends, *others, first=first)
        own = slice(int(ends[first - 1]) if first else 0, int(ends[first + count - 1]))
        kept = torch.ones(rows, dtype=torch.bool)
        kept[own] = False
        assert torch.equal(y[kept].isnan(), before[kept].isnan()) and not y[own].isnan().any()
        values = [Value(f"in{i}", tuple(v.shape), "fp64", "act") for i, v in enumerate((y, x, some, ends, *others))]
        op = Op(f"{kind}_part", tuple(values), (values[0],), {"first": first})
        flops += KINDS[op.kind].flops(op)
    assert torch.equal(y, whole)
    values = [Value(f"in{i}", tuple(v.shape), "fp64", "act") for i, v in enumerate((x, w, ends, *others))]
    total = KINDS[kind].flops(Op(kind, tuple(values), (Value("y", tuple(y.shape), "fp64", "act"),)))
    assert abs(flops - total) <= 3


def test_only_the_experts_of_a_row_are_counted() -> None:
    rows, x, y = TOKENS * K, (TOKENS * K, WIDTH), (TOKENS * K, HIDDEN)
    w, ends = Value("w", (EXPERTS * HIDDEN, WIDTH), "fp32", "param"), Value("ends", (EXPERTS,), "int32", "act")
    ins = {"": (x, w), "_dgrad": (y, w), "_wgrad": (y, x)}
    outs = {"": y, "_dgrad": x, "_wgrad": w.shape}
    for which, operands in ins.items():
        values = [v if isinstance(v, Value) else Value("v", v, "fp32", "act") for v in operands]
        definition = KINDS[f"grouped_linear{which}"]
        (spec,) = definition.infer([*values, ends], {})
        assert spec.shape == outs[which]
        op = Op(definition.kind, (*values, ends), (Value("out", spec.shape, spec.dtype, "act"),))
        assert definition.flops(op) == 2 * rows * WIDTH * HIDDEN


@pytest.mark.parametrize(
    ("kind", "shapes", "attrs", "message"),
    [
        ("route", [(4, 3)], {"k": 4, "normalize": True}, "k must be from 1 to 3"),
        ("grouped_linear", [(8, 6), (10, 6), (4,)], {}, "the 10 rows of w are no multiple of 4 experts"),
        ("grouped_linear", [(8, 5), (12, 6), (4,)], {}, "x has 5 columns, w has 6"),
        (
            "grouped_linear_pair",
            [(8, 6), (12, 6), (4,), (8, 2), (8, 2)],
            {},
            r"the products are fp32 \[8, 3\] and fp32",
        ),
        ("grouped_linear_part", [(8, 3), (8, 6), (6, 6), (4,)], {"first": 3}, "w has experts 3 to 5 of 4"),
        ("grouped_linear_part", [(8, 3), (8, 6), (7, 6), (4,)], {"first": 0}, "the 7 rows of w are no multiple of 3"),
        ("grouped_linear_dgrad_part", [(8, 5), (8, 3), (6, 6), (4,)], {"first": 0}, r"base is in0:fp32\[8,5\], the"),
        ("gather_rows", [(3, 2), (8,), (8,)], {}, "8 rows are no multiple of 3 tokens"),
        ("router_load", [(8, 4), (8, 2), (8,)], {"layer": 2, "layers": 2}, "layer must be from 0 to 1, got 2"),
        ("router_load", [(8, 4), (8, 2), (7,)], {"layer": 0, "layers": 2}, "targets must be int32"),
        ("weighted_swiglu", [(8, 4), (3, 2), (8,)], {}, "weights must be fp32 with 8 elements"),
    ],
)
def test_shapes_that_do_not_fit_are_refused(
    kind: str, shapes: list[tuple[int, ...]], attrs: dict[str, Any], message: str
) -> None:
    indices = [len(s) == 1 or (kind, i) == ("router_load", 1) for i, s in enumerate(shapes)]
    ins = [Value(f"in{i}", s, "int32" if indices[i] else "fp32", "act") for i, s in enumerate(shapes)]
    with pytest.raises(ProgramError, match=message):
        KINDS[kind].infer(ins, attrs)
