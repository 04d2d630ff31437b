"""Rules of routers, biases and gates against formulas of their own, and their gradients against autograd, in fp64."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.api import Builder, Op, OpDef, ProgramError, Value
from surogate_core.testing.ops import check_op
from surogate_models_moe.ops import OPS

KINDS = {definition.kind: definition for definition in OPS}
TOKENS, EXPERTS, K = 9, 8, 3


def run(kind: str, *ins: Tensor, **attrs: Any) -> tuple[Tensor, ...]:
    return check_op(KINDS[kind], *ins, **attrs)


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def by_hand(logits: Tensor, bias: Tensor | None, attrs: dict[str, Any]) -> tuple[list[list[int]], Tensor]:
    """Choose for one token after another. Return the experts, and their weights with a gradient."""
    chosen, weights = [], []
    for row in logits:
        scores = row.sigmoid() if attrs.get("scoring") == "sigmoid" else row.softmax(0)
        compared = (scores if bias is None else scores + bias).tolist()
        size = EXPERTS // attrs.get("groups", 1)
        groups = [range(i, i + size) for i in range(0, EXPERTS, size)]
        judged = sorted(groups, key=lambda group: -sum(sorted((compared[e] for e in group), reverse=True)[:2]))
        best = [e for group in judged[: attrs.get("chosen_groups", 1)] for e in group]
        experts = sorted(best, key=lambda e: -compared[e])[:K]
        taken = scores[experts]
        taken = taken / (taken.sum() + attrs.get("epsilon", 0.0)) if attrs["normalize"] else taken
        chosen.append(experts)
        weights.append(taken * attrs.get("scale", 1.0))
    return chosen, torch.stack(weights)


RULES = [
    {"scoring": scoring, "normalize": normalize, **groups, **more}
    for scoring, normalize, groups in product(
        ("softmax", "sigmoid"), (False, True), ({}, {"groups": 4, "chosen_groups": 2}, {"groups": 2})
    )
    for more in ({}, {"scale": 2.5}, *([{"epsilon": 0.1, "scale": 0.5}] if normalize else []))
]


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_a_rule_of_a_router_is_that_of_one_token_after_another(rule: dict[str, Any], biased: bool) -> None:
    logits, bias = draw(TOKENS, EXPERTS).requires_grad_(), 0.5 * draw(EXPERTS, seed=1) if biased else None
    chosen, wanted = by_hand(logits, bias, rule)
    given = (logits.detach(), *([] if bias is None else [bias]))
    weights, experts = run("route", *given, k=K, **rule)
    assert experts.tolist() == chosen and torch.allclose(weights, wanted, rtol=1e-13)
    d_weights = draw(TOKENS, K, seed=2)
    (expected,) = torch.autograd.grad(wanted, logits, d_weights)
    weighing = {name: value for name, value in rule.items() if "groups" not in name}
    (ours,) = run("route_bwd", d_weights, logits.detach(), experts, **weighing)
    assert torch.allclose(ours, expected, rtol=1e-11, atol=1e-15)


def test_a_bias_decides_between_experts_and_is_no_part_of_their_weights() -> None:
    logits, bias = draw(TOKENS, EXPERTS), torch.zeros(EXPERTS, dtype=torch.float64)
    bias[5] = 10
    weights, experts = run("route", logits, bias, k=1, normalize=False, scoring="sigmoid")
    assert experts.flatten().tolist() == [5] * TOKENS
    assert torch.equal(weights[:, 0], logits[:, 5].sigmoid())


def test_of_equal_scores_the_lower_expert_and_the_lower_group_are_first() -> None:
    logits, bias = torch.zeros(2, 6), torch.zeros(6)
    bias[4] = -1
    _, experts = run("route", logits, bias, k=4, normalize=True, scoring="sigmoid", groups=3, chosen_groups=2)
    assert experts.tolist() == [[0, 1, 2, 3]] * 2


def rows_of(tokens: int, experts: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return experts, order, place and ends. The last expert has no rows."""
    chosen = torch.stack(
        [torch.randperm(experts - 1, generator=torch.Generator().manual_seed(t))[:K] for t in range(tokens)]
    )
    return chosen.int(), *run("expert_order", chosen.int(), n_experts=experts)


def gradients(kind: str, ins: list[Tensor], dy: Tensor, **attrs: Any) -> list[Tensor | None]:
    """Return what the ops that `OpDef.vjp` emits compute, by their references."""
    definition = KINDS[kind]
    values = tuple(
        Value(f"in{i}", tuple(x.shape), {torch.int32: "int32"}.get(x.dtype, "fp64"), "act") for i, x in enumerate(ins)
    )
    outs = tuple(Value(s.label, s.shape, s.dtype, "act") for s in definition.infer(values, attrs))
    seed = Value("dy", tuple(dy.shape), "fp64", "act")
    builder, held = Builder(KINDS, "fp64"), dict(zip((*values, seed), (*ins, dy), strict=True))
    assert definition.vjp is not None
    with builder.record("backward") as ops:
        found = definition.vjp(builder, Op(kind, values, outs, attrs), (seed, *(None for _ in outs[1:])))
    for op in ops:
        made = run(op.kind, *(held[v] for v in op.ins), **op.attrs)
        held |= dict(zip(op.outs, made, strict=True))
    return [None if v is None else held[v] for v in found]


def test_biases_of_both_products_and_all_gradients_are_those_of_autograd() -> None:
    """Experts without rows have a gradient of zero."""
    width, inner = 6, 4
    experts, order, _, ends = rows_of(TOKENS, EXPERTS)
    weights = draw(TOKENS, K, seed=3).abs()
    shapes = ((TOKENS * K, width), (EXPERTS * inner, width), (EXPERTS, inner))
    leaves = [draw(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    x, w, bias = leaves
    of_row = experts.flatten().long()[order.long()]
    expected = torch.einsum("rk,rnk->rn", x, w.view(EXPERTS, inner, width)[of_row]) + bias[of_row]
    detached = [leaf.detach() for leaf in leaves]
    given = [*detached[:2], ends, detached[2]]
    assert torch.allclose(run("grouped_linear", *given)[0], expected, rtol=1e-12)
    dy = draw(TOKENS * K, inner, seed=4)
    wanted = torch.autograd.grad(expected, leaves, dy)
    dx, dw, none, db = gradients("grouped_linear", given, dy)
    assert none is None and not wanted[2][-1].any()
    for ours, theirs in zip((dx, dw, db), wanted, strict=True):
        assert ours is not None and torch.allclose(ours, theirs, rtol=1e-11, atol=1e-14)

    leaves = [draw(TOKENS, width, seed=5).requires_grad_(), weights.clone().requires_grad_()]
    leaves.append(draw(EXPERTS, width, seed=6).requires_grad_())
    y, route, down_bias = leaves
    expected = y + (route[:, :, None] * down_bias[experts.long()]).sum(1)
    detached = [leaf.detach() for leaf in leaves]
    given = [*detached[:2], experts, detached[2]]
    assert torch.allclose(run("add_expert_bias", *given)[0], expected, rtol=1e-12)
    dy = draw(TOKENS, width, seed=7)
    wanted = torch.autograd.grad(expected, leaves, dy)
    dy_passed, d_weights, none, d_bias = gradients("add_expert_bias", given, dy)
    assert none is None and dy_passed is dy
    for ours, theirs in zip((d_weights, d_bias), wanted[1:], strict=True):
        assert ours is not None and torch.allclose(ours, theirs, rtol=1e-11, atol=1e-14)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("limit", [0.0, 0.7])
@pytest.mark.parametrize(("alpha", "offset"), [(1.0, 0.0), (1.702, 1.0)])
def test_the_gate_and_its_gradients_are_those_of_autograd(
    alpha: float, offset: float, limit: float, interleaved: bool
) -> None:
    inner, form = 5, {"alpha": alpha, "offset": offset, "limit": limit, "interleaved": interleaved}
    _, order, _, _ = rows_of(TOKENS, EXPERTS)
    both, weights = draw(TOKENS * K, 2 * inner).requires_grad_(), draw(TOKENS, K, seed=1).requires_grad_()
    gate, up = (both[:, ::2], both[:, 1::2]) if interleaved else both.chunk(2, dim=1)
    gate, up = (gate.clamp(max=limit), up.clamp(-limit, limit)) if limit else (gate, up)
    expected = gate * torch.sigmoid(alpha * gate) * (up + offset) * weights.flatten()[order.long(), None]
    given = [both.detach(), weights.detach(), order]
    assert torch.allclose(run("weighted_swiglu", *given, **form)[0], expected, rtol=1e-12)
    dy = draw(TOKENS * K, inner, seed=2)
    wanted = torch.autograd.grad(expected, [both, weights], dy)
    d_both, d_weights, none = gradients("weighted_swiglu", given, dy, **form)
    assert none is None and d_both is not None and d_weights is not None
    assert torch.allclose(d_both, wanted[0], rtol=1e-11, atol=1e-14)
    assert torch.allclose(d_weights, wanted[1], rtol=1e-11, atol=1e-14)


def test_an_element_at_its_limit_has_a_gradient_and_one_above_it_has_none() -> None:
    gate_up = torch.tensor([[0.5, 0.6, -3.0, 0.5, -0.5, 0.6]], dtype=torch.float64)  # gates, then values
    ins = (gate_up, torch.ones(1, 1, dtype=torch.float64), torch.zeros(1, dtype=torch.int32))
    d_both, _ = run("weighted_swiglu_bwd", torch.ones(1, 3, dtype=torch.float64), *ins, limit=0.5)
    assert (d_both != 0).tolist() == [[True, False, True, True, True, False]]


def test_what_a_backward_op_is_told_is_what_the_forward_op_was_told() -> None:
    """So the programs of a family that gives no attribute have none."""
    logits = Value("logits", (4, 8), "bf16", "act")
    for attrs in ({"k": 2, "normalize": True}, {"k": 2, "normalize": True, "scoring": "sigmoid", "groups": 2}):
        outs = tuple(Value(s.label, s.shape, s.dtype, "act") for s in KINDS["route"].infer([logits], attrs))
        builder = Builder(KINDS, "bf16")
        with builder.record("backward") as ops:
            KINDS["route"].vjp(builder, Op("route", (logits,), outs, attrs), (outs[0], None))  # type: ignore[misc]
        (op,) = ops
        assert dict(op.attrs) == {name: value for name, value in attrs.items() if name not in ("k", "groups")}


F, B, INT = "fp32", "bf16", "int32"


@pytest.mark.parametrize(
    ("kind", "ins", "attrs", "message"),
    [
        ("route", [(B, 4, 8)], {"scoring": "tanh"}, "scoring must be softmax or sigmoid, got 'tanh'"),
        ("route", [(B, 4, 8)], {"groups": 3}, "groups must divide the 8 experts, got 3"),
        ("route", [(B, 4, 8)], {"groups": 2, "chosen_groups": 3}, "chosen_groups must be from 1 to groups, 2, got 3"),
        ("route", [(B, 4, 8)], {"groups": 8, "chosen_groups": 2}, "8 groups have one each"),
        ("route", [(B, 4, 8)], {"groups": 4, "k": 3}, "k must be at most 2, the experts of 1 groups, got 3"),
        ("route", [(B, 4, 8)], {"epsilon": -1.0}, "epsilon must be at least 0, got -1"),
        ("route", [(B, 4, 8)], {"epsilon": 0.1, "normalize": False}, "normalize is False"),
        ("route", [(B, 4, 8), (B, 8)], {}, r"bias must be fp32 \[8\], not"),
        ("route", [(B, 4, 8), (F, 7)], {}, r"bias must be fp32 \[8\], not"),
        ("grouped_linear", [(B, 8, 6), (B, 12, 6), (INT, 4), (B, 4, 4)], {}, r"bias must have the shape \[4, 3\]"),
        ("add_expert_bias", [(B, 4, 6), (F, 4, 2), (INT, 4, 2), (B, 5, 3)], {}, r"bias must have the shape \[5, 6\]"),
        ("add_expert_bias", [(B, 4, 6), (B, 4, 2), (INT, 4, 2), (B, 5, 6)], {}, "weights must be fp32 with 8 elements"),
        ("weighted_swiglu", [(B, 8, 6), (F, 4, 2), (INT, 8)], {"limit": -7.0}, "limit must be positive, or 0 for none"),
    ],
)
def test_what_no_op_computes_is_refused(
    kind: str, ins: list[tuple[Any, ...]], attrs: dict[str, Any], message: str
) -> None:
    values = [Value(f"in{i}", tuple(shape), dtype, "act") for i, (dtype, *shape) in enumerate(ins)]
    definition: OpDef = KINDS[kind]
    if kind == "route":
        attrs = {"k": 2, "normalize": True, **attrs}
    with pytest.raises(ProgramError, match=message):
        definition.infer(values, attrs)
