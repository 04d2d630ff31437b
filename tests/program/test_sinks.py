"""Attention sinks are an epilogue of attention: an op behind it, and the gradient of attention by other out and lse.

A sink is one more term of the softmax of a head, with a value of zero. Two made-up ops compute it from out and lse. One
takes over the gradient of qkv and emits `attention_bwd` with its own out' and lse'. The other has no rule, so autograd
gives gradients of out and lse, and attention's rule takes both.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from small_programs import INIT, VOCABULARY, Trained, draw, train
from torch import Tensor

from surogate_core.api import Builder, Emitter, Gradients, Op, OpDef, OutSpec, Value

T, C, H, G, D = 11, 6, 4, 2, 3
DOCUMENTS = [0, 4, 11, 11]
SIZES = {"n_heads": H, "n_kv_heads": G, "head_dim": D, "seq_len": T}
SCORES: dict[str, dict[str, Any]] = {
    **{"all keys": {}, "window": {"window": 3}, "cap": {"softcap": 1.5}},
    "all": {"window": 2, "scale": 0.7, "softcap": 2.0},
}
FORMS = ("owns the gradient", "has no rule")
PARTS = ({"sunk"}, {"attention", "lse", "sunk", "sunk_lse"}, {"qkv", "attention", "lse"}, {"qkv", "attention", "sunk"})


def sink(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """out' = out * sigmoid(lse - sink), lse' = log(exp(lse) + exp(sink))."""
    kept = (lse - sinks[:, None]).sigmoid().T[..., None]
    return (out.view(len(out), len(sinks), -1) * kept).reshape(out.shape), torch.logaddexp(lse, sinks[:, None])


def owning_sink(
    qkv: Tensor, cu_seqlens: Tensor, out: Tensor, lse: Tensor, sinks: Tensor, **attrs: Any
) -> tuple[Tensor, Tensor]:
    """`sink`, which needs qkv and cu_seqlens for its gradient alone."""
    return sink(out, lse, sinks)


def sink_bwd(dout: Tensor, out: Tensor, lse: Tensor, sinks: Tensor, dlse: Tensor | None = None) -> Tensor:
    """The gradient of the sinks, by out' and lse'."""
    delta = (dout * out).view(len(out), len(sinks), -1).sum(-1).T
    return ((sinks[:, None] - lse).exp() * ((0 if dlse is None else dlse) - delta)).sum(1)


def _sunk(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    out, lse, _ = ins[-3:]
    return [OutSpec("sunk", out.shape, out.dtype), OutSpec("sunk_lse", lse.shape, lse.dtype)]


def _owning_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    """Attention's own out and lse have no gradient: that of qkv is here."""
    qkv, cu_seqlens, _, _, sinks = op.ins
    (dout, dlse), (out, lse) = grads, op.outs
    assert dout is not None
    more = () if dlse is None else (dlse,)
    dqkv = b.apply("attention_bwd", dout, qkv, out, lse, cu_seqlens, *more, label="d_qkv", own=False, **op.attrs)
    return dqkv, None, None, None, b.apply("sink_bwd", dout, out, lse, sinks, *more)


OPS = {
    **VOCABULARY,
    "sink": OpDef(kind="sink", infer=_sunk, reference=f"{__name__}:sink"),
    "owning_sink": OpDef(
        kind="owning_sink",
        infer=_sunk,
        reference=f"{__name__}:owning_sink",
        attrs=VOCABULARY["attention"].attrs,
        vjp=_owning_vjp,
    ),
    "sink_bwd": OpDef(
        kind="sink_bwd",
        infer=lambda ins, attrs: [OutSpec("d_sinks", ins[3].shape, ins[3].dtype)],
        reference=f"{__name__}:sink_bwd",
        optional={"dlse": 4},
    ),
}


def trained(
    form: str, scores: Mapping[str, Any], *, reads_lse: bool = False, dropped: set[str] | None = None
) -> Trained:
    """Two layers of attention with sinks. The loss reads the last, and `reads_lse`: the log-sum-exp of both."""

    def build(b: Builder) -> Value:
        x, cu_seqlens = b.param("x", (T, C), INIT), b.input("cu_seqlens", (len(DOCUMENTS),), "int32")
        losses = []
        for i in range(2):
            with b.block(i):
                qkv = b.apply("linear", x, b.param(f"{i}.qkv", ((H + 2 * G) * D, C), INIT), label="qkv")
                attention = b.emit("attention", qkv, cu_seqlens, **SIZES, **scores)
                sinks = b.param(f"{i}.sinks", (H,), INIT)
                if form == FORMS[0]:
                    out, lse = b.emit("owning_sink", qkv, cu_seqlens, *attention, sinks, **SIZES, **scores)
                else:
                    out, lse = b.emit("sink", *attention, sinks)
                x = b.apply("add", x, b.apply("linear", out, b.param(f"{i}.o", (C, H * D), INIT), label="attn_out"))
            if reads_lse:
                losses.append(b.apply("toy_dot", lse, b.input(f"{i}.lse_direction", lse.shape, lse.dtype)))
        total = b.apply("toy_dot", x, b.input("direction", x.shape, x.dtype))
        for loss in losses:
            total = b.apply("add", total, loss)
        return total

    contents = {"cu_seqlens": torch.tensor(DOCUMENTS, dtype=torch.int32)}
    return train(build, grad_dtype="fp64", ops=OPS, contents=contents, dropped=dropped or ())


def by_definition(qkv: Tensor, sinks: Tensor, scores: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    """Return out and lse, token by token: a softmax over the keys that it sees and the sink."""
    q, k, v = (x.unflatten(1, (-1, D)) for x in qkv.split([H * D, G * D, G * D], dim=1))
    outs, lses, cap = [], [], scores.get("softcap", 0.0)
    for start, stop in pairwise(DOCUMENTS):
        for i in range(start, stop):
            first = max(start, i - scores["window"] + 1) if "window" in scores else start
            keys, values = (x[first : i + 1].repeat_interleave(H // G, dim=1) for x in (k, v))
            s = (keys * q[i]).sum(-1) * scores.get("scale", D**-0.5)
            s = torch.cat([cap * (s / cap).tanh() if cap else s, sinks[None]])
            outs.append((s.softmax(0)[:-1, :, None] * values).sum(0).flatten())
            lses.append(s.logsumexp(0))
    return torch.stack(outs), torch.stack(lses, dim=1)


def expected(run: Trained, scores: Mapping[str, Any], reads_lse: bool) -> dict[str, Tensor]:
    """Return the gradients by torch's autograd."""
    leaves = {param.name: run.param(param.name).clone().requires_grad_() for param in run.gradients}

    def direction(name: str, shape: tuple[int, ...]) -> Tensor:
        return draw(Value(name, shape, "fp64", "input"))

    x, total = leaves["x"], torch.zeros((), dtype=torch.float64)
    for i in range(2):
        out, lse = by_definition(x @ leaves[f"{i}.qkv"].T, leaves[f"{i}.sinks"], scores)
        x = x + out @ leaves[f"{i}.o"].T
        if reads_lse:
            total = total + (lse * direction(f"{i}.lse_direction", (H, T))).sum()
    total = total + (x * direction("direction", (T, C))).sum()
    return dict(zip(leaves, torch.autograd.grad(total, list(leaves.values())), strict=True))


@pytest.mark.parametrize("reads_lse", [False, True])
@pytest.mark.parametrize("scores", SCORES.values(), ids=SCORES)
@pytest.mark.parametrize("form", FORMS)
def test_sinks_behind_attention_have_the_gradients_of_a_softmax_with_one_more_term(
    form: str, scores: dict[str, Any], reads_lse: bool
) -> None:
    """In fp64, with shared key heads and two documents. Scores of up to 100 lose two digits: 1e-12 of each gradient."""
    run = trained(form, scores, reads_lse=reads_lse)
    found = run.run()
    for name, exact in expected(run, scores, reads_lse).items():
        error = float((found[name] - exact).norm() / exact.norm())
        assert error <= 1e-12, f"{name}: {error:.1e}"


@pytest.mark.parametrize("dropped", PARTS, ids=lambda labels: "+".join(sorted(labels)))
@pytest.mark.parametrize("form", FORMS)
def test_recomputed_parts_of_attention_with_sinks_change_no_bit(form: str, dropped: set[str]) -> None:
    kept = trained(form, SCORES["window"], reads_lse=True)
    again = trained(form, SCORES["window"], reads_lse=True, dropped=dropped)
    assert any(op.phase == "recompute" for op in again.programs["micro_first"].ops)
    before, after = kept.run(), again.run()
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_an_op_that_owns_the_gradient_keeps_out_and_lse_of_itself_alone() -> None:
    """The backward pass reads neither out nor lse of attention, so they are dead after the forward pass."""
    ops = trained(FORMS[0], {}).programs["micro_first"].ops
    attentions = {out for op in ops if op.kind == "attention" for out in op.outs}
    assert not any(attentions & set(op.ins) for op in ops if op.phase == "backward")


def test_out_and_lse_that_are_said_to_be_attentions_own_are_taken_as_such() -> None:
    """The reference then divides by sums over the keys, so a rule that forgets `own` is wrong on a CPU already."""
    from surogate_core.reference.attention import attention, attention_bwd

    qkv, dout = (draw(Value(name, shape, "fp64", "input")) for name, shape in (("q", (T, 24)), ("d", (T, 12))))
    cu_seqlens = torch.tensor(DOCUMENTS, dtype=torch.int32)
    out, lse = sink(*attention(qkv, cu_seqlens, **SIZES), torch.zeros(H, dtype=torch.float64))
    right, wrong = (attention_bwd(dout, qkv, out, lse, cu_seqlens, own=own, **SIZES) for own in (False, True))
    assert (wrong - right).norm() > 0.1 * right.norm()
