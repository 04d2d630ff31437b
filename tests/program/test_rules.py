"""Backward rules of the standard ops, compared with finite differences and with autograd through the references."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from random_programs import VOCABULARY
from small_programs import INIT, Build, train

from surogate_core.program.builder import Builder
from surogate_core.program.value import Value
from surogate_core.standard_ops import OPS

T, C, V = 6, 4, 5
INTEGERS = {
    "tokens": torch.tensor([3, 0, 3, 4, 1, 3]),
    "targets": torch.tensor([0, -100, 4, 2, -100, 2]),
    "cu_seqlens": torch.tensor([0, 1, 4, 4, 6]),
    "loss_scale": torch.tensor(0.25),
}


def _dot(b: Builder, *outs: Value) -> Value:
    """Return a scalar that depends on every element of every output, each with a different weight."""
    losses = [
        b.apply("toy_dot", out, b.input(f"direction{i}", out.shape, out.dtype), label="part")
        for i, out in enumerate(outs)
    ]
    total = losses[0]
    for loss in losses[1:]:
        total = b.apply("add", total, loss)
    return total


def _embedding(b: Builder) -> Value:
    return _dot(b, b.apply("embedding", b.input("tokens", (T,), "int32"), b.param("w", (V, C), INIT)))


def _linear(b: Builder) -> Value:
    return _dot(b, b.apply("linear", b.param("x", (T, C), INIT), b.param("w", (3, C), INIT)))


def _linear_bias(b: Builder) -> Value:
    ins = (b.param("x", (T, C), INIT), b.param("w", (3, C), INIT), b.param("bias", (3,), INIT))
    return _dot(b, b.apply("linear", *ins))


def _linear_of_activations(b: Builder) -> Value:
    """Operand, weight and bias are outputs of other ops."""
    x = b.apply("linear", b.param("x", (T, C), INIT), b.param("u", (C, C), INIT))
    w = b.apply("linear", b.param("a", (3, 2), INIT), b.param("b", (C, 2), INIT))
    bias = b.apply("cast", b.param("bias", (3,), INIT), dtype=b.dtype)
    return _dot(b, b.apply("linear", x, w, bias, dtype=b.dtype))


def _linear_add(b: Builder) -> Value:
    """The base is a product too, so that both addends have a gradient."""
    base = b.apply("linear", b.param("y", (T, 2), INIT), b.param("v", (3, 2), INIT))
    return _dot(b, b.apply("linear_add", b.param("x", (T, C), INIT), b.param("w", (3, C), INIT), base))


def _linear_pair(b: Builder) -> Value:
    x, w = b.param("x", (T, C), INIT), b.param("w", (3, C), INIT)
    return _dot(b, b.apply("linear_pair", x, w, b.param("y", (T, 2), INIT), b.param("v", (3, 2), INIT)))


def _rmsnorm(b: Builder, **attrs: Any) -> Value:
    return _dot(b, b.apply("rmsnorm", b.param("x", (T, C), INIT), b.param("w", (C,), INIT), eps=1e-3, **attrs))


def _add_rmsnorm(b: Builder, **attrs: Any) -> tuple[Value, Value]:
    ins = (b.param("x", (T, C), INIT), b.param("r", (T, C), INIT), b.param("w", (C,), INIT))
    x = b.apply("linear", ins[0], b.param("u", (C, C), INIT))
    r = b.apply("swiglu", b.apply("linear", ins[1], b.param("v", (2 * C, C), INIT)))
    norm, _, residual = b.emit("add_rmsnorm", x, r, ins[2], eps=1e-3, **attrs)
    return norm, residual


def _add_rmsnorm_norm(b: Builder) -> Value:
    return _dot(b, _add_rmsnorm(b)[0])


def _add_rmsnorm_residual(b: Builder) -> Value:
    """The norm is not read. Its weight is trained through another op."""
    residual = _add_rmsnorm(b)[1]
    return _dot(b, residual, next(v for v in b.declared if v.name == "w"))


def _add_rmsnorm_both(b: Builder, **attrs: Any) -> Value:
    return _dot(b, *_add_rmsnorm(b, **attrs))


def _add_rmsnorm_to_itself(b: Builder) -> Value:
    x = b.apply("linear", b.param("x", (T, C), INIT), b.param("u", (C, C), INIT))
    norm, _, residual = b.emit("add_rmsnorm", x, x, b.param("w", (C,), INIT), eps=1e-3)
    return _dot(b, norm, residual, x)


def _attention(b: Builder, read: Sequence[int] = (0,), **scores: Any) -> Value:
    """`read`: the outputs that the loss reads; 0: out, 1: lse."""
    heads = {"n_heads": 4, "n_kv_heads": 2, "head_dim": 2, **scores}
    qkv = b.param("qkv", (T, 16), INIT)
    outs = b.emit("attention", qkv, b.input("cu_seqlens", (5,), "int32"), seq_len=T, **heads)
    return _dot(b, *(outs[i] for i in read))


def _swiglu(b: Builder) -> Value:
    return _dot(b, b.apply("swiglu", b.param("gate_up", (T, 6), INIT)))


def _cross_entropy(b: Builder, **attrs: Any) -> Value:
    """The op computes the loss. It is replaced by the op that also computes the gradients."""
    ins = (b.param("x", (T, C), INIT), b.param("w", (V, C), INIT))
    given = (b.input("targets", (T,), "int32"), b.input("loss_scale", (), "fp32"))
    return b.apply("lm_head_ce", *ins, *given, chunks=2, **attrs)


def _cross_entropy_inside(b: Builder) -> Value:
    """The op computes a part of the loss. It is differentiated through its reference."""
    return _dot(b, _cross_entropy(b))


def _add(b: Builder) -> Value:
    return _dot(b, b.apply("add", b.apply("swiglu", b.param("x", (T, 6), INIT)), _linear_part(b)))


def _linear_part(b: Builder) -> Value:
    return b.apply("linear", b.param("y", (T, C), INIT), b.param("w", (3, C), INIT))


def _cast(b: Builder) -> Value:
    casts = (b.apply("cast", v, dtype=b.dtype) for v in (_linear_part(b), b.param("p", (3,), INIT)))
    return _dot(b, *casts)


def _without_rule(b: Builder) -> Value:
    """Third-party ops without a rule, with several outputs and an integer input."""
    x = b.apply("linear", b.param("x", (T, C), INIT), b.param("u", (C, C), INIT))
    split, energy, _ = b.emit("toy_split", x, b.input("tokens", (T,), "int32"))
    return _dot(b, b.apply("toy_mul", split, x), energy)


CASES: dict[str, tuple[str, Build]] = {
    "embedding": ("embedding", _embedding),
    "linear": ("linear", _linear),
    "linear with bias": ("linear", _linear_bias),
    "linear of activations": ("linear", _linear_of_activations),
    "linear_add": ("linear_add", _linear_add),
    "linear_pair": ("linear_pair", _linear_pair),
    "rmsnorm": ("rmsnorm", _rmsnorm),
    "rmsnorm with offset": ("rmsnorm", partial(_rmsnorm, offset=1.0)),
    "add_rmsnorm with offset": ("add_rmsnorm", partial(_add_rmsnorm_both, offset=1.0)),
    "add_rmsnorm, norm read": ("add_rmsnorm", _add_rmsnorm_norm),
    "add_rmsnorm, residual read": ("add_rmsnorm", _add_rmsnorm_residual),
    "add_rmsnorm, both read": ("add_rmsnorm", _add_rmsnorm_both),
    "add_rmsnorm, x is the residual": ("add_rmsnorm", _add_rmsnorm_to_itself),
    "attention": ("attention", _attention),
    "attention, windowed": ("attention", partial(_attention, window=2, scale=1.5, softcap=2.0)),
    "attention, both read": ("attention", partial(_attention, read=(0, 1))),
    "attention, lse read": ("attention", partial(_attention, read=(1,), window=2, softcap=2.0)),
    "swiglu": ("swiglu", _swiglu),
    "lm_head_ce": ("lm_head_ce", _cross_entropy),
    "lm_head_ce with a cap": ("lm_head_ce", partial(_cross_entropy, softcap=2.0)),
    "lm_head_ce as a part": ("lm_head_ce", _cross_entropy_inside),
    "add": ("add", _add),
    "cast": ("cast", _cast),
    "no rule": ("reference_vjp", _without_rule),
}

NOT_DIFFERENTIATED = {
    "unwritten",
    *(
        "embedding_bwd",
        "linear_dgrad",
        "linear_dgrad_add",
        "linear_dgrad_pair",
        "linear_wgrad",
        "linear_bgrad",
        "rmsnorm_bwd",
        "rmsnorm_bwd_recompute",
        "rmsnorm_dgrad",
        "rmsnorm_dgrad_recompute",
        "attention_bwd",
        "swiglu_bwd",
        "swiglu_bwd_recompute",
    ),
    *("lm_head_ce_grads", "fill", "accumulate_rounded", "copy", "commit", "move", "wait"),
    *("global_norm", "square_sums", "norm_of_sums", "all_reduce", "reduce_scatter", "reduce"),
    *("all_gather", "broadcast", "take_part"),
}


def test_every_standard_op_is_tested_here_or_has_no_gradient() -> None:
    assert {op for op, _ in CASES.values()} | NOT_DIFFERENTIATED == {definition.kind for definition in OPS}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_rule_agrees_with_finite_differences(name: str, seed: int) -> None:
    """Central differences with step h = 1e-5 in fp64 have an error of h^2 |L'''| / 6 + eps |L| / h, about 1e-10 for
    contents of order one. 1e-7 of |gradient| allows for large third derivatives and detects any wrong term."""
    trained = train(CASES[name][1], contents=INTEGERS)
    gradients = trained.run()
    generator = torch.Generator().manual_seed(seed)
    step, slope, size = 1e-5, 0.0, 0.0
    directions = {n: torch.randn(g.shape, generator=generator, dtype=torch.float64) for n, g in gradients.items()}
    losses = []
    for sign in (1, -2):
        for param, direction in directions.items():
            trained.param(param).add_(direction, alpha=sign * step)
        losses.append(trained.value_of_loss())
    for param, direction in directions.items():
        slope += float((gradients[param] * direction).sum())
        size += float(gradients[param].norm() * direction.norm())
    assert size > 0.01
    assert abs((losses[0] - losses[1]) / (2 * step) - slope) <= 1e-7 * size


@pytest.mark.parametrize(("dtype", "bound"), [("fp64", 1e-13), ("fp32", 1e-5)])
@pytest.mark.parametrize("name", CASES)
def test_rule_agrees_with_autograd_through_the_reference(name: str, dtype: str, bound: float) -> None:
    """Sums of at most 30 terms err by about 30 eps of the largest term (eps 1e-16 or 6e-8). The bounds also allow for
    cancellation in the norms."""
    automatic = {kind: replace(d, vjp=None, loss_with_grads=None) for kind, d in VOCABULARY.items()}
    by_rule = train(CASES[name][1], dtype=dtype, contents=INTEGERS).run()
    by_torch = train(CASES[name][1], dtype=dtype, contents=INTEGERS, ops=automatic).run()
    assert by_rule.keys() == by_torch.keys()
    for param, gradient in by_rule.items():
        assert (gradient - by_torch[param]).norm() <= bound * by_torch[param].norm(), param
