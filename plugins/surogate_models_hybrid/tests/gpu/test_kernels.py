"""Kernels of hybrid models, compared with the references in fp64 on the same inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from surogate_core.api import Op, Value
from surogate_core.testing.binding import run_kernel, run_op
from surogate_core.testing.kernels import assert_close, relative_error, same_bits
from surogate_models_hybrid import kernels, reference
from surogate_models_hybrid.kernels import KERNELS
from surogate_models_hybrid.ops import OPS

pytestmark = pytest.mark.gpu

DEFINITIONS = {definition.kind: definition for definition in OPS}
BF16 = torch.bfloat16


def run(kind: str, *ins: Tensor, **attrs: Any) -> list[Tensor]:
    return run_op(KERNELS, DEFINITIONS[kind], ins, attrs)


def truth(kind: str, *ins: Tensor, **attrs: Any) -> Any:
    """Evaluate the reference in fp64."""
    return getattr(reference, kind)(*(x.double() if x.is_floating_point() else x for x in ins), **attrs)


def positions_of(lengths: Sequence[int]) -> Tensor:
    return torch.cat([torch.arange(length) for length in lengths]).int()


def drawn(*shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(shape)).to(BF16)


def written(
    kind: str, ins: Sequence[Tensor], outs: Sequence[Value], before: dict[int, Tensor], **attrs: Any
) -> list[Tensor]:
    """Run an op that writes `outs`, or adds to those at the indices of `before`."""
    values = [Value(f"in{i}", tuple(x.shape), _dtype(x), "act") for i, x in enumerate(ins)]
    op = Op(kind, tuple(values), tuple(outs), attrs, accumulate=frozenset(before))
    contents = dict(zip(values, ins, strict=True)) | {outs[i]: x for i, x in before.items()}
    return run_kernel(KERNELS, op, contents)


def _dtype(x: Tensor) -> str:
    return {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "int32"}[x.dtype]


# ---------------------------------------------------------------------------------------------------------- convolution

CONVOLUTIONS = [([64], 8, 4), ([1, 2, 3, 40, 83], 520, 4), ([200], 64, 3), ([130, 5, 7], 1032, 7), ([300], 8, 5)]
"""Documents, columns, taps: documents shorter than the taps, and runs of tokens that end inside of one."""


@pytest.mark.parametrize("silu", [True, False])
@pytest.mark.parametrize(("lengths", "columns", "taps"), CONVOLUTIONS, ids=str)
def test_convolution_and_its_gradients_match_fp64(lengths: list[int], columns: int, taps: int, silu: bool) -> None:
    positions, tokens = positions_of(lengths), sum(lengths)
    x, dy, w = drawn(tokens, columns), drawn(tokens, columns), drawn(columns, 1, taps, scale=0.5)
    (y,) = run("causal_conv", x, w, positions, silu=silu)
    assert_close(y, truth("causal_conv", x, w, positions, silu=silu), BF16, taps, 8.0)
    dx, dw = run("causal_conv_bwd", dy, x, w, positions, silu=silu)
    (alone,) = run("causal_conv_dgrad", dy, x, w, positions, silu=silu)
    true_dx, true_dw = truth("causal_conv_bwd", dy, x, w, positions, silu=silu)
    assert_close(dx, true_dx, BF16, 2 * taps, 12.0)
    assert same_bits(dx, alone)
    assert_close(dw, true_dw, torch.float32, tokens, 4.0 * tokens**0.5)
    before = torch.randn(columns, 1, taps)
    outs = [Value("dx", (tokens, columns), "bf16", "act"), Value("dw", (columns, 1, taps), "fp32", "grad")]
    _, total = written("causal_conv_bwd", (dy, x, w, positions), outs, {1: before}, silu=silu)
    assert same_bits(total, before + dw)
    outs[1] = Value("dw", (columns, 1, taps), "bf16", "grad")
    same_dx, rounded = written("causal_conv_bwd", (dy, x, w, positions), outs, {}, silu=silu)
    assert same_bits(same_dx, dx) and same_bits(rounded, dw.to(BF16))


# ----------------------------------------------------------------------------------------------------- gated delta rule

DOCUMENTS = [
    [64],
    [256],
    [64, 128],
    [1, 2, 63, 64, 65, 129, 60],
    [700, 324, 1024],
    [5] * 100 + [12],
    [33, 31, 1, 127, 128],
]
HEADS = [(1, 1), (2, 4), (1, 3), (2, 8)]
"""Key heads and value heads: each key head is of one to four."""


def inputs(lengths: list[int], key_heads: int, heads: int, slow: bool = False) -> tuple[Tensor, ...]:
    """Return qkv, ba, a_log, dt_bias and positions. slow: a token keeps 0.997 of the state and more."""
    tokens = sum(lengths)
    a_log = torch.full((heads,), -6.0) if slow else (16 * torch.rand(heads) + 0.01).log()
    ba = drawn(tokens, 2 * heads)
    return drawn(tokens, (2 * key_heads + heads) * 128), ba, a_log, torch.randn(heads), positions_of(lengths)


def sizes_of(key_heads: int, heads: int) -> dict[str, int]:
    return {"n_k_heads": key_heads, "n_v_heads": heads, "k_dim": 128, "v_dim": 128}


@pytest.mark.parametrize("slow", [False, True], ids=["fast", "slow"])
@pytest.mark.parametrize(("key_heads", "heads"), HEADS)
@pytest.mark.parametrize("lengths", DOCUMENTS, ids=lambda lengths: f"{len(lengths)} of {sum(lengths)}")
def test_the_delta_rule_and_its_gradients_match_fp64(
    lengths: list[int], key_heads: int, heads: int, slow: bool
) -> None:
    """Operands of products are bf16: matrices of a chunk, what enters the state, and the state itself.

    Each has an error of 2^-9 of its size, and a result is a sum of products of three of them.
    """
    ins, sizes = inputs(lengths, key_heads, heads, slow), sizes_of(key_heads, heads)
    out, states = run("gated_delta_rule", *ins, **sizes)
    true_out, true_states = truth("gated_delta_rule", *ins, **sizes)
    assert out.isfinite().all() and states.isfinite().all()
    assert relative_error(out, true_out) < 2.0**-6
    assert not true_states.any() or relative_error(states, true_states) < 2.0**-6
    assert same_bits(run("gated_delta_out", *ins, **sizes)[0], out)
    assert same_bits(run("gated_delta_states", *ins, **sizes)[0], states)

    dout, given = drawn(sum(lengths), heads * 128), true_states.to(BF16)
    found = run("gated_delta_rule_bwd", dout, *ins, given, **sizes)
    true = truth("gated_delta_rule_bwd", dout, *ins, given, **sizes)
    keys = key_heads * 128
    columns = {"dq": slice(keys), "dk": slice(keys, 2 * keys), "dv": slice(2 * keys, None)}
    errors = {name: relative_error(found[0][:, part], true[0][:, part]) for name, part in columns.items()}
    errors |= {"db": relative_error(found[1][:, :heads], true[1][:, :heads])}
    errors |= {"da": relative_error(found[1][:, heads:], true[1][:, heads:])}
    assert all(gradient.isfinite().all() for gradient in found)
    assert max(errors.values()) < 2.0**-5, errors
    # Sums over tokens, whose terms may cancel. Those of a chunk share rounded matrices, so their errors may be alike;
    # those of chunks add up like random numbers.
    _, ba, _, dt_bias, _ = ins
    x = ba[:, heads:].double() + dt_bias.double()
    of_dt_bias = true[1][:, heads:]
    of_a_log = of_dt_bias * F.softplus(x) / x.sigmoid()
    terms = torch.stack([of_a_log, of_dt_bias])
    bounds = 2.0**-5 * torch.stack([chunk.abs().sum(1) for chunk in terms.split(64, dim=1)]).norm(dim=0)
    differences = (torch.stack(found[2:]).double() - torch.stack(true[2:])).abs()
    if not (differences <= bounds).all():
        bounds += 2.0**4 * change_by_rounding(dout, ins, given, true[2:], sizes)
    assert (differences <= bounds).all(), differences / bounds


def change_by_rounding(
    dout: Tensor, ins: Sequence[Tensor], states: Tensor, sums: Sequence[Tensor], sizes: dict[str, int]
) -> Tensor:
    """Return how much da_log and ddt_bias change if operands are rounded, by 2^-9 of their size: of two trials.

    Where decays are fast, few pairs of tokens count, and the products of vectors of which their terms are made may
    themselves be sums that cancel.
    """
    qkv, *others = ins
    changes = []
    for _ in range(2):
        rounded = [x.double() * (1 + 2.0**-9 * torch.randn(x.shape).double()) for x in (dout, qkv, states)]
        _, _, *changed = truth("gated_delta_rule_bwd", rounded[0], rounded[1], *others, rounded[2], **sizes)
        changes.append((torch.stack(changed) - torch.stack(list(sums))).abs())
    return torch.stack(changes).amax(dim=0)


BLOCKS = pytest.mark.parametrize("block", [0, 163, 99], ids=["all", "163 KiB", "99 KiB"])
"""Shared memory of a block of the backward pass: that of this device, of an A100, and of RTX cards."""


@BLOCKS
@pytest.mark.parametrize("lengths", [[64], [1, 2, 63, 64, 65, 129, 60]], ids=lambda lengths: f"{len(lengths)}")
def test_gradients_match_fp64_with_less_shared_memory(
    lengths: list[int], block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kernels, "SHARED_MEMORY", block * 1024)
    ins, sizes = inputs(lengths, 2, 6, slow=True), sizes_of(2, 6)
    dout, states = drawn(sum(lengths), 6 * 128), drawn(sum(lengths) // 64, 6, 128, 128)
    found = run("gated_delta_rule_bwd", dout, *ins, states, **sizes)
    true = truth("gated_delta_rule_bwd", dout, *ins, states, **sizes)
    for x, y in zip(found[:2], true[:2], strict=True):
        assert relative_error(x, y) < 2.0**-5


@BLOCKS
def test_no_bit_of_a_document_depends_on_the_tokens_of_another(block: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in the reference: decays begin anew in each document, and all that is masked adds zeros.

    The others' gradients are large, so that a sum of decays over documents would show in bf16.
    """
    monkeypatch.setattr(kernels, "SHARED_MEMORY", block * 1024)
    lengths, sizes, cut = [30, 77, 149], sizes_of(2, 4), slice(30, 107)
    qkv, ba, *others = inputs(lengths, 2, 4, slow=True)
    rows = [qkv, ba, drawn(256, 4 * 128)]
    changed = [torch.cat((2 * x[:30].flip(0), x[cut], x[107:].flip(0) - 1)) for x in rows]
    changed[2][:30], changed[2][107:] = 1024 * rows[2][:30], 1024 * rows[2][107:]
    results = []
    for *ins, dout in (rows, changed):
        out, states = run("gated_delta_rule", *ins, *others, **sizes)
        dqkv, dba, *_ = run("gated_delta_rule_bwd", dout, *ins, *others, states, **sizes)
        results.append((out, dqkv, dba))
    assert all(same_bits(x[cut], y[cut]) for x, y in zip(*results, strict=True))
    assert not any(same_bits(x, y) for x, y in zip(*results, strict=True))


def test_documents_have_the_bits_that_they_have_alone() -> None:
    """Each begins at a chunk, so that its sums are those of a row of its own."""
    lengths, sizes = [128, 64, 192], sizes_of(2, 4)
    ins = inputs(lengths, 2, 4, slow=True)
    out, _ = run("gated_delta_rule", *ins, **sizes)
    begin = 0
    for length in lengths:
        rows = slice(begin, begin + length)
        qkv, ba, a_log, dt_bias, positions = ins
        (alone,) = run("gated_delta_out", qkv[rows], ba[rows], a_log, dt_bias, positions[rows], **sizes)
        assert same_bits(alone, out[rows])
        begin += length


@pytest.mark.parametrize("rounded", [(True, True), (True, False), (False, True)], ids=str)
def test_gradients_of_decays_are_added_in_fp32_and_rounded_once_to_bf16(rounded: tuple[bool, bool]) -> None:
    ins, sizes = inputs([128], 1, 2), sizes_of(1, 2)
    dout, states = drawn(128, 256), drawn(2, 2, 128, 128)
    every = (dout, *ins, states)
    *_, da_log, ddt_bias = run("gated_delta_rule_bwd", *every, **sizes)
    outs = [Value(name, tuple(ins[i].shape), "bf16", "act") for i, name in enumerate(("dqkv", "dba"))]
    outs += [Value(name, (2,), "fp32", "grad") for name in ("da_log", "ddt_bias")]
    before = {2: torch.randn(2), 3: torch.randn(2)}
    *_, of_a_log, of_dt_bias = written("gated_delta_rule_bwd", every, outs, before, **sizes)
    assert same_bits(of_a_log, before[2] + da_log) and same_bits(of_dt_bias, before[3] + ddt_bias)
    names = zip(("da_log", "ddt_bias"), rounded, strict=True)
    outs[2:] = [Value(name, (2,), "bf16" if narrow else "fp32", "grad") for name, narrow in names]
    *_, of_a_log, of_dt_bias = written("gated_delta_rule_bwd", every, outs, {}, **sizes)
    for found, exact, narrow in zip((of_a_log, of_dt_bias), (da_log, ddt_bias), rounded, strict=True):
        assert same_bits(found, exact.to(BF16) if narrow else exact)


# ---------------------------------------------------------------------------------------------------------------- gates


@pytest.mark.parametrize("shape", [(5, 3, 64), (333, 4, 128), (77, 2, 256), (1, 1, 128)], ids=str)
def test_the_gated_norm_and_its_gradients_match_fp64(shape: tuple[int, int, int]) -> None:
    tokens, heads, dim = shape
    x, gate, dy = (drawn(tokens, heads * dim) for _ in range(3))
    w = drawn(dim)
    y, rstd = run("gated_rmsnorm", x, gate, w, eps=1e-6)
    true_y, true_rstd = truth("gated_rmsnorm", x, gate, w, eps=1e-6)
    assert_close(y, true_y, BF16, dim)
    assert_close(rstd, true_rstd, torch.float32, dim)
    ins = (dy, x, gate, w, true_rstd.float())
    dx, d_gate, dw = run("gated_rmsnorm_bwd", *ins)
    true = truth("gated_rmsnorm_bwd", *ins)
    assert_close(dx, true[0], BF16, dim)
    assert_close(d_gate, true[1], BF16, dim)
    assert_close(dw, true[2], torch.float32, tokens * heads, 4.0 * (tokens * heads) ** 0.5 + 8)
    assert all(map(same_bits, run("gated_rmsnorm_dgrad", *ins), (dx, d_gate)))
    before = torch.randn(dim)
    outs = [Value(name, tuple(x.shape), "bf16", "act") for name in ("dx", "d_gate")]
    *_, total = written("gated_rmsnorm_bwd", ins, [*outs, Value("dw", (dim,), "fp32", "grad")], {2: before})
    assert same_bits(total, before + dw)
    *_, rounded = written("gated_rmsnorm_bwd", ins, [*outs, Value("dw", (dim,), "bf16", "grad")], {})
    assert same_bits(rounded, dw.to(BF16))


@pytest.mark.parametrize(("heads", "dim", "rest"), [(4, 64, 128), (1, 256, 8), (3, 8, 0)])
def test_queries_and_gates_are_moved(heads: int, dim: int, rest: int) -> None:
    x, attrs = drawn(33, 2 * heads * dim + rest), {"n_heads": heads, "head_dim": dim}
    qkv, gate = run("split_gate", x, **attrs)
    assert all(map(same_bits, (qkv, gate), reference.split_gate(x, **attrs)))
    assert same_bits(run("join_gate", qkv, gate, **attrs)[0], x)


@pytest.mark.parametrize(("key_heads", "heads", "k_dim", "v_dim"), [(2, 6, 8, 16), (16, 32, 128, 128), (1, 1, 64, 8)])
def test_projections_by_key_heads_are_sorted(key_heads: int, heads: int, k_dim: int, v_dim: int) -> None:
    sizes = {"n_k_heads": key_heads, "n_v_heads": heads, "k_dim": k_dim, "v_dim": v_dim}
    ins = drawn(33, 2 * key_heads * k_dim + 2 * heads * v_dim), drawn(33, 2 * heads)
    parts = run("split_key_heads", *ins, **sizes)
    assert all(map(same_bits, parts, reference.split_key_heads(*ins, **sizes)))
    assert all(map(same_bits, run("join_key_heads", *parts, **sizes), ins))


def test_the_sigmoid_gate_and_its_gradients_match_fp64() -> None:
    x, gate, dy = (drawn(65, 72) for _ in range(3))
    assert_close(run("sigmoid_gate", x, gate)[0], truth("sigmoid_gate", x, gate), BF16, 4)
    for found, true in zip(run("sigmoid_gate_bwd", dy, x, gate), truth("sigmoid_gate_bwd", dy, x, gate), strict=True):
        assert_close(found, true, BF16, 6)
