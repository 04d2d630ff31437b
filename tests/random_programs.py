"""Random valid programs of the standard ops and a few third-party ops, with functions to plan and run them.

Everything is determined by a seed. The same seed yields the same forward program independent of later passes, so that
two treatments of a program (recomputation, precision, memory plan) can be compared value by value.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import Any
from zlib import crc32

import torch
from torch import Tensor

from surogate_core.api import Emitter, Gradients, Init, Op, OpDef, OutSpec, Program, Rewrites, Scalars, Value
from surogate_core.assembly.streaming import Streaming
from surogate_core.assembly.transfers import HostCopies
from surogate_core.dtypes import DTYPES, accumulator
from surogate_core.errors import ProgramError
from surogate_core.memory.plan import ArenaPlan, MemoryPlan, plan_programs
from surogate_core.program.builder import Builder
from surogate_core.program.differentiate import differentiate
from surogate_core.program.passes.accumulate import accumulate
from surogate_core.program.passes.dead_code import dead_code
from surogate_core.program.passes.fuse_adds import fuse_adds
from surogate_core.program.passes.in_place import in_place
from surogate_core.program.passes.recompute import recompute
from surogate_core.program.verify import verify
from surogate_core.reference.ops import load, up
from surogate_core.runtime.arena import Buffers
from surogate_core.runtime.reference import ReferenceExecutor
from surogate_core.standard_ops import OPS

# The tensors are tiny. On shared cores, synchronizing a second thread takes ten times as long as the work itself.
torch.set_num_threads(1)

# ------------------------------------------------------------------------------------------------ third-party ops
# toy_split   no vjp, several outputs, an int input and an int output
# toy_watch   no vjp, changes a state: never recomputed, never removed
# toy_gate    vjp, and a rematerialize rule that computes its first output from its second
# toy_dot     scalar loss <x, direction>, no vjp
# toy_mul     elementwise product, no vjp
# toy_table   no vjp, and an output that does not depend on the floating-point input


def toy_split(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    wide = up(x)
    return (torch.tanh(wide) * (1 + ids[:, None] % 3)).to(x.dtype), wide.square().mean(1), ids + 1


def toy_watch(x: Tensor, largest: Tensor) -> tuple[Tensor, Tensor]:
    return (up(x) * 0.75).to(x.dtype), torch.maximum(largest, x.detach().abs().max().to(largest.dtype))


def toy_gate(x: Tensor) -> tuple[Tensor, Tensor]:
    gate = torch.sigmoid(up(x)).to(x.dtype)
    return toy_mul(x, gate), gate


def toy_mul(a: Tensor, b: Tensor) -> Tensor:
    return (up(a) * up(b)).to(a.dtype)


def toy_table(x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor]:
    return (up(x) * 2).to(x.dtype), ids.to(x.dtype)


def toy_gate_bwd(dy: Tensor, x: Tensor, gate: Tensor) -> Tensor:
    wide = up(gate)
    return (up(dy) * (wide + up(x) * wide * (1 - wide))).to(x.dtype)


def toy_dot(x: Tensor, direction: Tensor) -> Tensor:
    return (up(x) * up(direction)).sum()


def _split(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    x, ids = ins
    total = OutSpec("energy", x.shape[:1], accumulator(x.dtype))
    return [OutSpec("split", x.shape, x.dtype), total, OutSpec("count", ids.shape, "int32")]


def _same(*labels: str) -> Callable[[Sequence[Value], Mapping[str, Any]], list[OutSpec]]:
    return lambda ins, attrs: [OutSpec(label, ins[0].shape, ins[0].dtype) for label in labels]


def _watch(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    return [OutSpec("watched", ins[0].shape, ins[0].dtype)]


def _gate_vjp(b: Emitter, op: Op, grads: Gradients) -> Gradients:
    dy, dgate = grads
    if dgate is not None or dy is None:
        raise ProgramError(f"{op.where}: toy_gate has no rule for the gradient of its gate")
    return (b.apply("toy_gate_bwd", dy, *op.ins, op.outs[1]),)


def _gate_rematerialize(b: Emitter, op: Op, kept: frozenset[Value]) -> Gradients:
    gated, gate = op.outs
    if gate in kept:
        return b.apply("toy_mul", op.ins[0], gate, label=gated.label), None
    return b.emit("toy_gate", *op.ins)


def _table(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    return [OutSpec("doubled", ins[0].shape, ins[0].dtype), OutSpec("table", ins[1].shape, ins[0].dtype)]


def _dot(ins: Sequence[Value], attrs: Mapping[str, Any]) -> list[OutSpec]:
    return [OutSpec("loss", (), accumulator(ins[0].dtype))]


def _toy(kind: str, infer: Any, **fields: Any) -> OpDef:
    return OpDef(kind=kind, infer=infer, reference=f"{__name__}:{kind}", **fields)


TOYS = (
    _toy("toy_split", _split, workspace=lambda op: 100),
    _toy("toy_watch", _watch, changes=lambda ins, attrs: (1,)),
    _toy(
        "toy_gate",
        _same("gated", "gate"),
        vjp=_gate_vjp,
        rewrites=Rewrites(rematerialize=_gate_rematerialize),
        workspace=lambda op: 1000,
        may_overwrite=lambda op: {1: 0},
    ),
    _toy(
        "toy_gate_bwd",
        lambda ins, attrs: [OutSpec("d_gate", ins[1].shape, ins[1].dtype)],
        may_overwrite=lambda op: {0: 0},
    ),
    _toy("toy_mul", _same("product"), may_overwrite=lambda op: {0: 1}),
    _toy("toy_table", _table),
    _toy("toy_dot", _dot),
)
VOCABULARY: dict[str, OpDef] = {definition.kind: definition for definition in (*OPS, *TOYS)}

LABELS = (
    *("norm", "rstd", "residual", "qkv", "attention", "lse", "attn_out", "gate_up", "swiglu", "mlp_out"),
    *("split", "energy", "watched", "gated", "gate", "sum", "stream"),
)
"""Labels that recomputation can drop."""


def workspace(op: Op) -> int:
    """Return the workspace of `op` in bytes."""
    return VOCABULARY[op.kind].workspace(op)


# -------------------------------------------------------------------------------------------------- forward programs


class RandomForward:
    """A random forward program similar to a decoder. Holds `builder`, `program`, `loss` and the batch sizes."""

    def __init__(self, seed: int, dtype: str, ops: Mapping[str, OpDef] = VOCABULARY) -> None:
        self.seed = seed
        self.random = Random(seed)
        self.builder = Builder(ops, dtype)
        self.n_tokens = self.random.choice((4, 6, 8, 12, 20))
        self.vocab_size = self.random.randint(3, 40)
        self.n_kv_heads = self.random.choice((1, 2))
        self.n_heads = self.n_kv_heads * self.random.choice((1, 2, 3))
        self.head_dim = self.random.choice((2, 4, 6))
        self.width = self.random.choice((4, 6, 8, 24))
        self.max_documents = self.random.randint(1, self.n_tokens)
        b = self.builder
        self.tokens = b.input("tokens", (self.n_tokens,), "int32")
        self.targets = b.input("targets", (self.n_tokens,), "int32")
        self.cu_seqlens = b.input("cu_seqlens", (self.max_documents + 1,), "int32")
        self.loss_scale = b.input("loss_scale", (), "fp32")
        self.scalars = Scalars(
            lr=b.input("lr", (), "fp32"),
            step=b.input("step", (), "int32"),
            micro_step=b.input("micro_step", (), "int32"),
            seed=b.input("seed", (), "int64"),
        )
        self.largest = b.state("largest", (), "fp32", Init())
        self._params: list[Value] = []
        with b.record("forward"):
            self.loss = self._record()
            self.program = b.program(f"random {seed}", (self.loss,))
        verify(self.program, ops, "build")

    def _param(self, *shape: int, dtype: str | None = None, sharing: float = 0.25) -> Value:
        """Return a new param or, with probability `sharing`, an existing one of the same shape and dtype."""
        dtype = dtype or self.builder.dtype
        old = [p for p in self._params if p.shape == shape and p.dtype == dtype]
        if old and self.random.random() < sharing:
            return self.random.choice(old)
        param = self.builder.param(f"param{len(self._params)}", shape, Init(kind="normal", std=0.5), dtype=dtype)
        self._params.append(param)
        return param

    def _record(self) -> Value:
        b, rng = self.builder, self.random
        embedding = self._param(self.vocab_size, self.width)
        x: Value | None = None
        residual = b.apply("embedding", self.tokens, embedding)
        for block in range(rng.randint(1, 4)):
            with b.block(block):
                for _ in range(rng.randint(1, 3)):
                    x, residual = self._layer(x, residual)
        norm = self._normed(x, residual)[0]
        head = embedding if rng.random() < 0.4 else self._param(self.vocab_size, self.width)
        loss = self._cross_entropy(norm, head)
        if rng.random() < 0.2:  # the loss op is then no fused op, so the cross-entropies need incoming gradients
            loss = b.apply("add", loss, self._cross_entropy(residual, head))
        return loss

    def _cross_entropy(self, x: Value, head: Value) -> Value:
        chunks = self.random.choice([c for c in range(1, self.n_tokens + 1) if self.n_tokens % c == 0])
        return self.builder.apply("lm_head_ce", x, head, self.targets, self.loss_scale, chunks=chunks)

    def _layer(self, x: Value | None, residual: Value) -> tuple[Value | None, Value]:
        """Emit a norm and a branch. The next norm's op or a separate op adds the branch to the residual."""
        norm, residual = self._normed(x, residual)
        branch = self.random.choice((self._attention, self._mlp, self._mlp, self._toys, self._casts))(norm)
        if self.random.random() < 0.2:
            self._dead_branch(norm)
        if self.random.random() < 0.3:
            return None, self.builder.apply("add", branch, residual, label="sum")
        return branch, residual

    def _normed(self, x: Value | None, residual: Value) -> tuple[Value, Value]:
        weight = self._param(self.width)
        if x is None:
            return self.builder.apply("rmsnorm", residual, weight, eps=1e-5), residual
        norm, _, residual = self.builder.emit("add_rmsnorm", x, residual, weight, eps=1e-5)
        return norm, residual

    def _linear(self, x: Value, rows: int, label: str) -> Value:
        """Emit a linear op, sometimes with a bias, a branch of another rank, or a bf16 cast of an fp32 weight."""
        rng, b = self.random, self.builder
        if b.dtype == "bf16" and rng.random() < 0.2:
            weight = b.apply("cast", self._param(rows, x.shape[1], dtype="fp32"), dtype="bf16", label="stream")
            return b.apply("linear", x, weight, label=label)
        ins = [self._param(rows, x.shape[1])]
        if rng.random() < 0.3:
            ins.append(self._param(rows))
        y = b.apply("linear", x, *ins, label=label)
        if rng.random() < 0.4:
            rank = rng.choice((1, 2, 30))
            inner = b.apply("linear", x, self._param(rank, x.shape[1]), label=label)
            y = b.apply("add", y, b.apply("linear", inner, self._param(rows, rank), label=label), label=label)
        return y

    def _attention(self, norm: Value) -> Value:
        heads: dict[str, Any] = {"n_heads": self.n_heads, "n_kv_heads": self.n_kv_heads, "head_dim": self.head_dim}
        qkv = self._linear(norm, (self.n_heads + 2 * self.n_kv_heads) * self.head_dim, "qkv")
        attention = self.builder.apply("attention", qkv, self.cu_seqlens, seq_len=self.n_tokens, **heads)
        return self._linear(attention, self.width, "attn_out")

    def _mlp(self, norm: Value) -> Value:
        gate_up = self._linear(norm, 2 * self.random.choice((3, 8, 40)), "gate_up")
        return self._linear(self.builder.apply("swiglu", gate_up), self.width, "mlp_out")

    def _toys(self, norm: Value) -> Value:
        b = self.builder
        if self.random.random() < 0.5:
            watched = b.activation("watched", norm.shape, norm.dtype)
            b.emit("toy_watch", norm, self.largest, outs=[watched])
            norm = watched
        split, _, _ = b.emit("toy_split", norm, self.tokens)
        gated = b.apply("toy_gate", split)
        return b.apply("toy_mul", gated, norm) if self.random.random() < 0.5 else gated

    def _casts(self, norm: Value) -> Value:
        """Cast to the wide dtype and back, and add a table.

        The table is a param, or the sum or product of two params (or of one with itself). This yields gradients that
        several params share and that other ops read.
        """
        b = self.builder
        table = self._param(self.n_tokens, self.width)
        kind = self.random.choice(("", "", "add", "toy_mul"))
        if kind:
            table = b.apply(kind, table, self._param(self.n_tokens, self.width, sharing=0.5), label="stream")
        wide = b.apply("cast", norm, dtype=accumulator(b.dtype), label="stream")
        back = b.apply("cast", wide, dtype=b.dtype, label="stream")
        return b.apply("add", back, table, label="stream")

    def _dead_branch(self, norm: Value) -> None:
        self.builder.apply("swiglu", self._linear(norm, 6, "gate_up"))

    def frozen(self) -> frozenset[Value]:
        """Return the frozen params: none, a few, or all but one, and every param that the loss does not depend on."""
        rng = Random(f"{self.seed}/frozen")
        useful = _useful(self.program, self.loss)
        trains = [p for p in self._params if p in useful]
        share = rng.choice((0.0, 0.3, 0.9))
        chosen = {p for p in trains if rng.random() < share}
        if len(chosen) == len(trains):
            chosen.discard(trains[-1])
        return frozenset(chosen | (set(self._params) - useful))


def _useful(program: Program, loss: Value) -> set[Value]:
    """Return the values that the loss depends on."""
    useful = {loss}
    for op in reversed(program.ops):
        if any(out in useful for out in op.outs):
            useful.update(op.ins)
    return useful


# ---------------------------------------------------------------------------------------------------------- families


@dataclass(frozen=True, kw_only=True)
class Family:
    """The planned programs micro_first and micro_next of a random forward program. The state `loss` accumulates."""

    source: RandomForward
    trained: Program
    programs: Mapping[str, Program]
    gradients: Mapping[Value, Value]
    loss: Value
    memory: MemoryPlan


def moved(program: Program, builder: Builder, seed: str, share: float = 0.5) -> Program:
    """Return `program` with some activations moved to the host and back before later readers, at random distances.

    A random number of ops after the move to the host, "compute" waits for it; sometimes never.
    """
    rng = Random(seed)
    readers = program.readers()
    position = {op: index for index, op in enumerate(program.ops)}
    producers = program.producers()
    before: dict[int, list[Op]] = {}
    renamed: dict[tuple[Value, int], Value] = {}  # what a reader at this index reads instead
    for value, op in producers.items():
        later = [position[reader] for reader in readers.get(value, ())]
        if not later or value in program.outputs or rng.random() > share:
            continue
        out = rng.randint(position[op] + 1, later[-1] + 1)  # after this many ops the copy to the host is enqueued
        back = [index for index in later if index >= out]
        if not back:
            continue
        into = rng.randint(out, back[0])
        host = builder.activation(value.label, value.shape, value.dtype, place="host")
        again = builder.activation(value.label, value.shape, value.dtype)
        renamed |= {(value, index): again for index in back}
        with builder.record(op.phase, value.block) as emitted:
            builder.emit("move", value, outs=[host], lane="to_host")
            builder.emit("wait", host)
            builder.emit("move", host, outs=[again], lane="to_device")
        before.setdefault(out, []).append(emitted[0])
        if rng.random() < 0.8:
            before.setdefault(rng.randint(out, into), []).append(emitted[1])
        before.setdefault(into, []).append(emitted[2])
    ops: list[Op] = []
    for index, op in enumerate(program.ops):
        ops += before.get(index, ())
        ins = tuple(renamed.get((v, index), v) for v in op.ins)
        ops.append(op if ins == op.ins else replace(op, ins=ins))
    return replace(program, ops=tuple(ops))


def random_labels(seed: int) -> frozenset[str]:
    """Return a random set of labels to recompute."""
    rng = Random(f"{seed}/labels")
    share = rng.choice((0.2, 0.5, 0.9))
    return frozenset(label for label in LABELS if rng.random() < share)


def family(
    seed: int,
    *,
    dtype: str = "fp32",
    grad_dtype: str = "fp32",
    labels: frozenset[str] = frozenset(),
    blocks: int | None = None,
    freeze: bool = True,
    trim: bool = True,
    fuse: bool = True,
    reuse: bool = True,
    moves: bool = False,
    streams: bool = False,
    ops: Mapping[str, OpDef] = VOCABULARY,
    scratch: Callable[[Op], int] = workspace,
) -> Family:
    """Run forward -> freeze -> differentiate -> dead_code -> fuse_adds -> recompute -> accumulate -> in_place, verify
    each result, and plan.

    Values with one of `labels` are recomputed, in the first `blocks` blocks or in all. `trim`, `fuse` and `reuse` can
    leave out dead_code, fuse_adds and in_place; `moves` moves activations to the host; with `streams` the host holds
    half of the params and gradients.
    """
    source = RandomForward(seed, dtype, ops)
    b = source.builder
    frozen = source.frozen() if freeze else frozenset(source._params) - _useful(source.program, source.loss)
    program, gradients = differentiate(source.program, source.loss, b, lambda p: p not in frozen, grad_dtype)
    verify(program, ops, "differentiate")
    total = b.state("loss_sum", source.loss.shape, source.loss.dtype, Init(), collects="sum")
    program = program.on({source.loss: total})
    verify(program, ops, "outputs")
    if trim:
        program = dead_code(program, ops)
        verify(program, ops, "dead_code")
    if fuse:
        program = fuse_adds(program, ops)
        verify(program, ops, "fuse_adds")
    count = 1 + max(op.block for op in program.ops) if blocks is None else blocks
    program = recompute(program, lambda value: value.label in labels and value.block < count, b)
    verify(program, ops, "recompute")
    if moves:
        program = moved(program, b, f"{seed}/moved")
        verify(program, ops, "moved")
    first, following = accumulate(program, b, source.scalars)
    verify(first, ops, "accumulate")
    verify(following, ops, "accumulate")
    if streams:
        rng = Random(f"{seed}/streams")
        kept = (*source._params, *gradients.values())
        hosted = {value: b.on_host(value) for value in kept if rng.random() < 0.5}
        first, following = map(Streaming(HostCopies(hosted), b), (first, following))
        verify(first, ops, "streamed")
        verify(following, ops, "streamed")
        gradients = {hosted.get(param, param): hosted.get(grad, grad) for param, grad in gradients.items()}
    if reuse:
        first, following = (in_place(p, ops) for p in (first, following))
        verify(first, ops, "in_place")
        verify(following, ops, "in_place")
    return Family(
        source=source,
        trained=program,
        programs={p.name: p for p in (first, following)},
        gradients=gradients,
        loss=total,
        memory=plan_programs((first, following), b.declared, scratch),
    )


def placed(arena: ArenaPlan, offsets: Mapping[Value, int], arena_bytes: int) -> ArenaPlan:
    """Return the arena with its values at other places."""
    other = replace(arena)
    vars(other).update(offsets=offsets, arena_bytes=arena_bytes)  # as if they had been asked for
    return other


def without_sharing(memory: MemoryPlan) -> MemoryPlan:
    """Return the plan with separate memory for every value. Any correct plan must give the same results."""
    arenas = {}
    for name, arena in memory.arenas.items():
        offsets, at = {}, 0
        for life in arena.lives:
            for value in (life.value, *life.overwritten):
                offsets[value] = at
                at += life.nbytes
        arenas[name] = placed(arena, offsets, at)
    return MemoryPlan(memory.segments, arenas)


# ----------------------------------------------------------------------------------------------------------- running


class Run:
    """A family with its buffers. The contents of the params are determined by their names."""

    def __init__(self, given: Family, *, memory: MemoryPlan | None = None, poison: bool = True) -> None:
        self.family = given
        self.buffers = Buffers(memory or given.memory, poison=poison)
        ops = given.source.builder.ops
        self.executor = ReferenceExecutor(given.programs, ops, self.buffers, poison=poison)
        for value in given.source.builder.declared:
            if value.role == "param":
                self.buffers.persistent(value).copy_(random_content(value))

    def micro_step(self, program: str, batch: int = 0, *, micro_step: int = 1, seed: int = 1234) -> None:
        """Run `program` on the random batch number `batch`."""
        scalars = self.family.source.scalars
        for value, content in random_batch(self.family.source, batch).items():
            self.buffers.persistent(value).copy_(content)
        self.buffers.persistent(scalars.micro_step).fill_(micro_step)
        self.buffers.persistent(scalars.seed).fill_(seed)
        self.executor.run(program)

    def results(self) -> dict[str, Tensor]:
        """Return copies of the loss and of every gradient."""
        values = {"loss": self.family.loss, **{p.name: g for p, g in self.family.gradients.items()}}
        return {name: self.buffers.persistent(value).clone() for name, value in values.items()}


def random_content(param: Value) -> Tensor:
    """Return the contents of a param: standard normal times 0.5, independent of the precision."""
    generator = torch.Generator().manual_seed(crc32(param.name.encode()))
    return torch.randn(param.shape, generator=generator, dtype=torch.float64) * 0.5


def random_batch(source: RandomForward, batch: int = 0) -> dict[Value, Tensor]:
    """Return random tokens, targets (some without a label) and documents that partition the tokens."""
    rng = Random(f"{source.seed}/batch/{batch}")
    count = source.n_tokens
    cuts = sorted(rng.randint(0, count) for _ in range(source.max_documents - 1))
    return {
        source.tokens: torch.tensor([rng.randrange(source.vocab_size) for _ in range(count)]),
        source.targets: torch.tensor(
            [rng.randrange(source.vocab_size) if rng.random() < 0.7 else -100 for _ in range(count)]
        ),
        source.cu_seqlens: torch.tensor([0, *cuts, count]),
        source.loss_scale: torch.tensor(rng.choice((1.0, 0.125, 0.01))),
    }


def autograd(given: Family, batch: int = 0) -> dict[str, Tensor]:
    """Return loss and gradients of the forward program, computed by torch autograd through the references."""
    source = given.source
    held: dict[Value, Tensor] = dict(random_batch(source, batch))
    for value in source.builder.declared:
        if value.role == "param":
            held[value] = random_content(value).to(getattr(torch, _TORCH_NAMES[value.dtype]))
            held[value].requires_grad_(value in given.gradients)
        elif value.role == "state":
            held[value] = torch.zeros(value.shape)
        else:
            held.setdefault(value, torch.zeros(value.shape))
    for op in source.program.ops:
        results = load(source.builder.ops[op.kind].reference)(*(held[v] for v in op.ins), **op.attrs)
        held.update(zip(op.written, results if isinstance(results, tuple) else (results,), strict=True))
    held[source.loss].backward()
    gradients = {p.name: held[p].grad for p in given.gradients}
    assert all(g is not None for g in gradients.values())
    return {"loss": held[source.loss].detach(), **{name: g for name, g in gradients.items() if g is not None}}


_TORCH_NAMES = {"fp64": "float64", "fp32": "float32", "bf16": "bfloat16"}


def live_values(arena: ArenaPlan) -> Iterator[tuple[str, int, int, int, int]]:
    """Yield (name, first op, last op, offset, bytes) of every value and workspace in an arena.

    Values that have one place, one after another, have the life of that place.
    """
    for life in arena.lives:
        for value in (life.value, *life.overwritten) if life.value in arena.offsets else ():
            assert value.nbytes == DTYPES[value.dtype].nbytes(value.size)
            yield value.name, life.first, life.last, arena.offsets[value], value.nbytes
    for index, (offset, nbytes) in arena.workspace.items():
        yield f"workspace of op {index}", index, index, offset, nbytes
