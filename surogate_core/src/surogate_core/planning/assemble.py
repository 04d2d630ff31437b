"""From a config to planned programs: plugins build, passes rewrite, `verify` checks after each. No torch.

    forward    the model's build, then the adapters
    micro      differentiate -> outputs -> dead_code -> recipe.lower -> recompute -> offload
               -> accumulate: micro_first, micro_next
               -> reduce, with several workers: micro_last, or micro_only where it is also the first
    evaluate   the forward program without what is for training alone, lowered by the same recipe
               -> pending, of micro and evaluate: copies of the states that micro-steps write, if there are any
               micro and evaluate also in variants for batches of few documents
    load       masters from params
    update     global norm, then the optimizer; commits what is pending

All of them share params, gradients, states, inputs, and one arena.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from pydantic import BaseModel

from ..api import (
    AdapterDef,
    BatchInputs,
    Definition,
    DeviceInfo,
    Dims,
    Init,
    ModelDef,
    OffloadDef,
    OpDef,
    OptimizerDef,
    ParamGrad,
    Precision,
    RecipeDef,
    Scalars,
    WeightMap,
)
from ..errors import ConfigError, DisconnectedError, ProgramError
from ..memory.plan import MemoryPlan, plan_family
from ..origin import blaming
from ..program.builder import Builder
from ..program.differentiate import differentiate
from ..program.op import Op, Program, Stage
from ..program.passes.accumulate import accumulate
from ..program.passes.dead_code import dead_code
from ..program.passes.documents import for_fewer, smaller_bounds
from ..program.passes.evaluation import for_evaluation
from ..program.passes.outputs import write_to
from ..program.passes.pending import carried_states, on_copies
from ..program.passes.recompute import recompute
from ..program.passes.reduce import MicroStep, micro_step_counts, reduce
from ..program.value import DTYPE_BYTES, Value
from ..program.verify import verify

LOGITS_BYTES = 512 << 20
"""`lmhead_chunks: auto` keeps the logits of a chunk at or under this."""

RECOMPUTE_LABELS: Mapping[str, frozenset[str]] = {
    "rmsnorm": frozenset({"norm", "rstd"}),
    "swiglu": frozenset({"swiglu"}),
    "qkv": frozenset({"qkv", "rope"}),
    "att": frozenset({"qkv", "rope", "attention", "lse", "attn_out"}),
    "ffn": frozenset({"gate_up", "swiglu", "mlp_out"}),
    "block": frozenset(
        {
            *("norm", "rstd", "qkv", "rope", "attention", "lse", "attn_out"),
            *("residual_mid", "gate_up", "swiglu", "mlp_out"),
        }
    ),
}
"""What each `recompute_*` key drops, by label. A block keeps what enters it."""


@dataclass(frozen=True, kw_only=True)
class PlanInputs:
    """What a run is made of: definitions from plugins, each with its validated options, and the sizes.

    batch_size: rows of a worker's micro-step. grad_accum_steps: micro-steps of an optimizer step; which programs there
    are depends on whether it is 1, 2 or more. world_size: workers, a device each.
    """

    ops: Mapping[str, OpDef]
    model: ModelDef
    dims: Dims
    recipe: RecipeDef
    recipe_options: BaseModel
    optimizer: OptimizerDef
    optimizer_options: BaseModel
    precision: Precision
    batch_size: int
    seq_len: int
    max_documents: int
    grad_accum_steps: int = 2
    world_size: int = 1
    lmhead_chunks: int | None = None
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0
    recompute: frozenset[str] = frozenset()
    adapters: Sequence[tuple[AdapterDef, BaseModel]] = ()
    offload: tuple[OffloadDef, BaseModel] | None = None
    device: DeviceInfo | None = None
    workspace: Callable[[Op], int] | None = None


@dataclass(frozen=True)
class Pass:
    """A pass that ran, for the listing."""

    name: str
    program: str
    ops_before: int
    ops_after: int


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """The planned programs of a run and the values that the loop reads and writes.

    variants: by the name of a program that reads documents, the same program for batches of fewer documents, in
    ascending order of `Program.documents`. cu_seqlens: {`Program.documents`: the input that those variants read}.
    pending: copies of states that each step makes again: checkpoints do not hold them.
    """

    programs: Mapping[str, Program]
    variants: Mapping[str, tuple[Program, ...]]
    cu_seqlens: Mapping[int, Value]
    declared: tuple[Value, ...]
    trainable: tuple[Value, ...]
    memory: MemoryPlan
    batch: BatchInputs
    scalars: Scalars
    loss: Value
    eval_loss: Value
    grad_norm: Value
    weights: tuple[WeightMap, ...]
    pending: tuple[Value, ...]
    passes: tuple[Pass, ...]
    world_size: int

    @property
    def all_programs(self) -> dict[str, Program]:
        """Programs and their variants, by name."""
        fewer = (program for variants in self.variants.values() for program in variants)
        return {**self.programs, **{program.name: program for program in fewer}}

    def micro_step(self, *, first: bool, last: bool) -> Program:
        """The program of a micro-step of an optimizer step; see `Program.first` and `Program.last`."""
        kind = MicroStep(first, last and self.world_size > 1)
        return next(p for p in self.programs.values() if p.stage == "micro" and MicroStep(p.first, p.last) == kind)

    def only(self, stage: Stage) -> Program:
        """The one program of a stage that has one: "evaluate", "update" or "load"."""
        (program,) = (p for p in self.programs.values() if p.stage == stage)
        return program

    def for_documents(self, program: Program, documents: int) -> Program:
        """The variant of `program` for the fewest documents that still serves a batch of `documents`."""
        fewer = self.variants.get(program.name, ())
        return next((p for p in fewer if p.documents is not None and documents <= p.documents), program)

    @property
    def params(self) -> dict[str, Value]:
        """Params by name."""
        return {v.name: v for v in self.declared if v.role == "param"}


@dataclass
class PassRunner:
    """Verifies what each pass returns and lists the passes. `checked`: ops found sound after an earlier pass."""

    ops: Mapping[str, OpDef]
    checked: set[Op] = field(default_factory=set)
    passes: list[Pass] = field(default_factory=list)

    def __call__(
        self, name: str, before: Program | None, after: Program, by: tuple[Definition, str] | None = None
    ) -> Program:
        """`by`: the plugin's definition and function that returned `after`; None: a pass of core."""
        definition, function = by or (None, "")
        with blaming(definition.origin if definition else None, function):
            verify(after, self.ops, name, self.checked)
        self.passes.append(Pass(name, after.name, len(before.ops) if before else 0, len(after.ops)))
        return after


def assemble(given: PlanInputs) -> Assembly:
    """Build, rewrite, verify and plan every program of a run.

    Raises ConfigError for sizes that do not go together and ProgramError when a plugin emits a program that breaks
    the rules. About a second for the largest dense models; needs neither torch nor a device.
    """
    line = PassRunner(given.ops)
    b = Builder(given.ops, given.precision.model)
    batch = _batch(b, given)
    scalars = _scalars(b)
    forward, loss = _build(b, batch, given, line)
    weights = _checked_weights(given, b.declared)
    forward, loss = _adapt(b, forward, loss, weights, scalars, given, line)
    loss_state = b.state("step_loss", loss.shape, loss.dtype, Init(kind="zeros"))
    eval_state = b.state("eval_loss", loss.shape, loss.dtype, Init(kind="zeros"))

    evaluate = line("evaluation", forward, for_evaluation(forward, given.ops))
    evaluate = line("outputs", evaluate, write_to(evaluate, dict.fromkeys(evaluate.outputs, eval_state)))
    evaluate = _lower(b, evaluate, given, line)

    of_model = {m.param: m for m in weights}

    def trainable(param: Value) -> bool:
        stored = of_model.get(param.name)
        return not given.adapters or any(adapter.trainable(param, stored, o) for adapter, o in given.adapters)

    micro, gradients = _micro(b, forward, loss, loss_state, trainable, given, scalars, line)
    params = [
        _with_master(b, param, grad, _master_dtype(param, given.precision.master, of_model))
        for param, grad in gradients.items()
    ]
    load = line("load", None, _load(b, params))
    copies = _pending(b, micro, evaluate, frozenset({loss_state, eval_state}), given)
    if copies:
        steps = [on_copies(p, copies, b, begins=p.first) for p in micro]
        micro = [line("pending", before, after) for before, after in zip(micro, steps, strict=True)]
        evaluate = line("pending", evaluate, on_copies(evaluate, copies, b, begins=True))
    update, grad_norm = _update(b, params, copies, given, scalars)
    update = line("optimizer", None, update, (given.optimizer, "update"))

    programs = {p.name: p for p in (load, *micro, evaluate, update)}
    bounds = smaller_bounds(given.max_documents, given.batch_size)
    offsets = {n: b.input(f"{batch.cu_seqlens.name}@{n}", (n + 1,), batch.cu_seqlens.dtype) for n in bounds}
    variants = _variants((*micro, evaluate), batch.cu_seqlens, offsets, line)
    return Assembly(
        programs=programs,
        variants=variants,
        cu_seqlens=offsets,
        declared=b.declared,
        trainable=tuple(gradients),
        memory=plan_family(
            programs.values(),
            b.declared,
            given.workspace or (lambda op: op_workspace(given.ops, op)),
            variants,
        ),
        batch=batch,
        scalars=scalars,
        loss=loss_state,
        eval_loss=eval_state,
        grad_norm=grad_norm,
        weights=weights,
        pending=tuple(copies.values()),
        passes=tuple(line.passes),
        world_size=given.world_size,
    )


def op_workspace(ops: Mapping[str, OpDef], op: Op) -> int:
    """Scratch bytes that the op's definition asks for."""
    return ops[op.kind].workspace(op)


def auto_lmhead_chunks(tokens: int, vocab_size: int, dtype: str) -> int:
    """The smallest number of equal chunks whose logits stay within LOGITS_BYTES each."""
    row = vocab_size * DTYPE_BYTES[dtype]
    return min(c for c in _divisors(tokens) if tokens // c * row <= LOGITS_BYTES or c == tokens)


def _divisors(n: int) -> list[int]:
    """By its prime factors: counting up to `n` would hang on a batch size that is a large prime."""
    divisors, rest, factor = [1], n, 2
    while rest > 1:
        factor = factor if factor * factor <= rest else rest
        power = 1
        found = divisors
        while rest % factor == 0:
            rest //= factor
            power *= factor
            divisors = divisors + [d * power for d in found]
        factor += 1
    return divisors


def _batch(b: Builder, given: PlanInputs) -> BatchInputs:
    tokens = given.batch_size * given.seq_len
    wider = max(given.precision.model, given.precision.matmul, key=DTYPE_BYTES.__getitem__)
    chunks = given.lmhead_chunks or auto_lmhead_chunks(tokens, given.dims.vocab_size, wider)
    if tokens % chunks:
        raise ConfigError(
            f"lmhead_chunks: {chunks} does not divide per_device_train_batch_size x sequence_len = {tokens} tokens. "
            "Use a divisor, or auto."
        )
    return BatchInputs(
        tokens=b.input("tokens", (tokens,), "int32"),
        targets=b.input("targets", (tokens,), "int32"),
        positions=b.input("positions", (tokens,), "int32"),
        cu_seqlens=b.input("cu_seqlens", (given.max_documents + 1,), "int32"),
        loss_scale=b.input("loss_scale", (), "fp32"),
        seq_len=given.seq_len,
        lmhead_chunks=chunks,
    )


def _scalars(b: Builder) -> Scalars:
    return Scalars(
        lr=b.input("lr", (), "fp32"),
        step=b.input("step", (), "int32"),
        micro_step=b.input("micro_step", (), "int32"),
        seed=b.input("seed", (), "int64"),
    )


def _build(b: Builder, batch: BatchInputs, given: PlanInputs, line: PassRunner) -> tuple[Program, Value]:
    with b.record("forward"):
        loss = given.model.build(b, given.dims, batch)
        return line("build", None, b.program("forward", (loss,)), (given.model, "build")), loss


def _adapt(
    b: Builder,
    forward: Program,
    loss: Value,
    weights: Sequence[WeightMap],
    scalars: Scalars,
    given: PlanInputs,
    line: PassRunner,
) -> tuple[Program, Value]:
    for adapter, options in given.adapters:
        adapted = adapter.apply(forward, b, given.precision, weights, scalars, options)
        forward = line(f"adapter {adapter.name}", forward, adapted, (adapter, "apply"))
        if len(forward.outputs) != 1:
            with blaming(adapter.origin, "apply"):
                raise ProgramError(
                    f"adapter {adapter.name} returned {len(forward.outputs)} outputs; the loss is the only one"
                )
        (loss,) = forward.outputs
    return forward, loss


def _micro(
    b: Builder,
    forward: Program,
    loss: Value,
    total: Value,
    trainable: Callable[[Value], bool],
    given: PlanInputs,
    scalars: Scalars,
    line: PassRunner,
) -> tuple[list[Program], dict[Value, Value]]:
    """The micro-step's variants that an optimizer step runs, and {param: gradient}."""
    before = Program("micro", forward.ops, forward.outputs, stage="micro")
    try:
        program, gradients = differentiate(before, loss, b, trainable, given.precision.param_grad)
    except DisconnectedError as error:  # of the forward program, whose last author it is
        last, function = (given.adapters[-1][0], "trainable") if given.adapters else (given.model, "build")
        with blaming(last.origin, function):
            raise error
    program = line("differentiate", forward, program)
    program = line("outputs", program, write_to(program, {loss: total}))
    program = line("dead_code", program, dead_code(program, given.ops))
    program = _lower(b, program, given, line)
    if given.recompute or any(given.ops[op.kind].always_recomputed for op in program.ops):
        labels = frozenset().union(*(RECOMPUTE_LABELS[part] for part in given.recompute))
        program = line("recompute", program, recompute(program, labels, b))
    if given.offload:
        strategy, options = given.offload
        if given.device is None:
            raise ProgramError(f"offload {strategy.name}: no device, hence no bytes to stay under")
        scheduled = strategy.schedule(program, b, given.device.memory_bytes, options)
        program = line("offload", program, scheduled, (strategy, "schedule"))
    first, following = accumulate(program, frozenset({total}), b, scalars)
    variants = [line("accumulate", program, p) for p in (first, following)[: given.grad_accum_steps]]
    if given.world_size == 1:
        return variants, gradients
    *_, final = variants
    variants.append(line("reduce", final, reduce(final, gradients, (total,), b, given.world_size)))
    by_kind = {MicroStep(p.first, p.last): p for p in variants}
    return [by_kind[kind] for kind in micro_step_counts(given.grad_accum_steps, given.world_size)], gradients


def _lower(b: Builder, program: Program, given: PlanInputs, line: PassRunner) -> Program:
    lowered = given.recipe.lower(program, b, given.precision, given.recipe_options)
    return line("lower", program, lowered, (given.recipe, "lower"))


def _variants(
    programs: Sequence[Program], cu_seqlens: Value, offsets: Mapping[int, Value], line: PassRunner
) -> dict[str, tuple[Program, ...]]:
    """For each program that reads documents, one for each of `offsets` in place of `cu_seqlens`."""
    return {
        program.name: tuple(
            line("documents", program, for_fewer(program, cu_seqlens, shorter)) for shorter in offsets.values()
        )
        for program in programs
        if offsets and any(cu_seqlens in op.ins for op in program.ops)
    }


def _master_dtype(param: Value, asked: str, of_model: Collection[str]) -> str:
    """`master_dtype` is of the model's own weights. An adapter's are stored as wide as they are asked to be trained,
    so only a wider master gains anything: a narrower one would lose what their dtype was chosen for."""
    return asked if param.name in of_model else max(param.dtype, asked, key=DTYPE_BYTES.__getitem__)


def _with_master(b: Builder, param: Value, grad: Value, master_dtype: str) -> ParamGrad:
    if param.dtype in (master_dtype, "fp64"):
        return ParamGrad(param, grad, param)
    return ParamGrad(param, grad, b.state(f"master.{param.name}", param.shape, master_dtype, None))


def _load(b: Builder, params: Sequence[ParamGrad]) -> Program:
    """Masters from params. A param wider than its master becomes what the master holds, as after every update."""
    with b.record("load"):
        for p in params:
            if p.master is not p.param:
                b.emit("cast", p.param, outs=[p.master], dtype=p.master.dtype)
                if DTYPE_BYTES[p.master.dtype] < DTYPE_BYTES[p.param.dtype]:
                    b.emit("cast", p.master, outs=[p.param], dtype=p.param.dtype)
        return b.program("load", stage="load")


def _pending(
    b: Builder, micro: Sequence[Program], evaluate: Program, sums: frozenset[Value], given: PlanInputs
) -> dict[Value, Value]:
    """A pending copy for every state that a skipped step must leave as it was."""
    states = carried_states(micro, evaluate, given.ops, sums)
    return {v: b.state(f"pending.{v.name}", v.shape, v.dtype, None) for v in states}


def _update(
    b: Builder, params: Sequence[ParamGrad], copies: Mapping[Value, Value], given: PlanInputs, scalars: Scalars
) -> tuple[Program, Value]:
    norm = b.state("grad_norm", (), "fp32", Init(kind="zeros"))
    with b.record("update"):
        coef = b.activation("clip_coef", (), "fp32")
        b.emit("global_norm", *(p.grad for p in params), outs=[norm, coef], max_norm=given.max_grad_norm)
        given.optimizer.update(b, params, coef, scalars, given.precision, given.weight_decay, given.optimizer_options)
        for state, copy in copies.items():
            b.emit("commit", coef, copy, state, outs=[state])
        program = b.program("update", (norm,), stage="update")
    written = {v for op in program.ops for v in op.outs}
    forgotten = [v.name for p in params for v in dict.fromkeys((p.master, p.param)) if v not in written]
    if forgotten:
        with blaming(given.optimizer.origin, "update"):
            raise ProgramError(f"optimizer {given.optimizer.name} never writes: {', '.join(forgotten)}")
    return program, norm


def _checked_weights(given: PlanInputs, declared: Sequence[Value]) -> tuple[WeightMap, ...]:
    """The model's weight maps; ProgramError unless they cover the model's params exactly, shapes included."""
    maps = tuple(given.model.weights(given.dims))
    with blaming(given.model.origin, "weights"):
        _check_weights(given, maps, declared)
    return maps


def _check_weights(given: PlanInputs, maps: Sequence[WeightMap], declared: Sequence[Value]) -> None:
    model = f"model {given.model.name}"
    params = {v.name: v for v in declared if v.role == "param"}
    mapped = Counter(m.param for m in maps)
    if mapped.keys() != params.keys():
        raise ProgramError(f"{model}: weight maps and params differ: {sorted(mapped.keys() ^ params.keys())}")
    sources = Counter(t.name for m in maps for t in m.tensors)
    twice = [name for counts in (mapped, sources) for name, count in counts.items() if count > 1]
    if twice:
        raise ProgramError(f"{model}: mapped twice: {', '.join(twice)}")
    for m in maps:
        shape = params[m.param].shape
        given_shapes = [t.shape for t in m.tensors]
        if any(s[1:] != shape[1:] for s in given_shapes) or sum(s[0] for s in given_shapes) != shape[0]:
            parts = " + ".join(str(list(s)) for s in given_shapes) or "nothing"
            raise ProgramError(f"{model}: {m.param} is {list(shape)}, its checkpoint tensors make {parts}")
