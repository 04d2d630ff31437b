"""Finishes the recorded programs of a run: each method is a step of `assemble`, which calls them in order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from ..api import BatchInputs, OffloadContext, ParamInfo, Programs, Scalars
from ..config.keys import HELD_FOR_UPDATE
from ..errors import ConfigError, ProgramError
from ..origin import blaming
from ..program.builder import Builder
from ..program.op import Program
from ..program.passes.accumulate import accumulate
from ..program.passes.dead_code import dead_code
from ..program.passes.documents import for_fewer, refuse_sizes_by_documents, smaller_bounds
from ..program.passes.pending import on_copies, states_to_commit
from ..program.passes.recompute import drops_anyway, recompute
from ..program.passes.reduce import MicroStep, micro_step_counts, reduce
from ..program.passes.scatter import Scatter
from ..program.value import Value
from ..program.verify import check_collectives
from .divided_weights import divide_weights
from .inputs import PlanInputs
from .parts import gather_late, gradient_parts
from .pass_runner import PassRunner
from .staging import Staged
from .streaming import Streaming
from .transfers import HostCopies


@dataclass(frozen=True)
class Finisher:
    """Finishes the programs of one plan with a builder of its own. `passed` verifies what each pass returns."""

    inputs: PlanInputs
    b: Builder
    passed: PassRunner
    batch: BatchInputs
    scalars: Scalars

    def recomputed(self, program: Program) -> Program:
        """Return the program of a micro-step with recomputation."""
        inputs = self.inputs
        if inputs.recomputation or drops_anyway(program, inputs.ops):
            program = self.passed("recompute", program, recompute(program, inputs.recomputation.drops, self.b))
            program = self.passed("dead_code", program, dead_code(program, inputs.ops))  # outputs that were dropped
        return program

    def offloaded(
        self, programs: Programs, params: Mapping[Value, ParamInfo], states: Sequence[Value]
    ) -> tuple[Programs, Sequence[Value]]:
        """Apply the offload strategies. Return the programs, and the params, gradients and states held on the host."""
        on_host: dict[Value, None] = {}
        for strategy, options in self.inputs.offload:
            context = OffloadContext(
                builder=self.b, target=self.inputs.target, params=params, optimizer_states=states, options=options
            )
            if strategy.on_host is not None:
                values = tuple(strategy.on_host(programs, context))
                with blaming(strategy.origin, "on_host"):
                    _check_on_host(values)
                on_host |= dict.fromkeys(values)
            if strategy.schedule is not None:
                before, programs = {p.name: p for p in programs.all()}, strategy.schedule(programs, context)
                for program in programs.all():
                    if program is not before.get(program.name):
                        self.passed("offload", before.get(program.name), program, (strategy, "schedule"))
        return programs, tuple(on_host)

    def gathered_late(
        self, update: Program, micro_steps: Sequence[Program], on_host: Collection[Value]
    ) -> tuple[Program, list[Program], list[Program]]:
        """Let the first micro-steps gather the weights that an update leaves in parts."""
        found = gather_late(update, micro_steps, on_host)
        for before, after in zip((update, *micro_steps), (found[0], *found[1]), strict=True):
            if after is not before:
                self.passed("gather late", before, after)
        return found

    def divided(
        self, programs: Sequence[Program], staged: Sequence[Staged], params: Mapping[Value, ParamInfo]
    ) -> tuple[list[Program], list[Staged], Mapping[Value, Value]]:
        """Divide the weights among the ranks. Return the programs with gathers, what loads them, and {whole: part}."""
        sharding = self.inputs.sharding
        if not sharding.weights:
            return [*programs], [], {}
        places = {param for one in staged for param in one.places}
        weights = divide_weights(programs, places, params, sharding.parts, self.b)
        self.passed.replace_values(weights.parts.values())
        gathering = weights.programs(programs, self.b)
        loading = weights.loading(self.b)
        after = [self.passed("divide", before, program) for before, program in zip(programs, gathering, strict=True)]
        return [*after, *(self.passed("divide", None, one.program) for one in loading)], loading, weights.parts

    def streamed(self, programs: Sequence[Program], moved: Sequence[Value]) -> tuple[list[Program], dict[Value, Value]]:
        """Place values on the host. Return the programs with copies, and {value: what takes its place}."""
        host_places = {value: self.b.on_host(value) for value in moved}
        used = dict.fromkeys(v for p in programs for op in p.ops for v in op.ins if v.inside) if moved else ()
        host_places |= {
            v: replace(v, place="host", inside=host_places[v.inside]) for v in used if v.inside in host_places
        }
        self.passed.replace_values(host_places.values())
        streaming = Streaming(HostCopies(host_places), self.b, zero_copy=self.inputs.zero_copy)
        streamed = [self.passed("stream", p, streaming(p)) for p in programs] if moved else list(programs)
        if self.inputs.zero_copy is True and not streaming.uncopied:
            raise ConfigError(
                f"use_zero_copy: true: optimizer {self.inputs.optimizer.name} uses nothing that the host holds. "
                f"{HELD_FOR_UPDATE}, or remove the key."
            )
        return streamed, host_places

    def scattering(self, params: Mapping[Value, ParamInfo]) -> Scatter | None:
        """Return the pass that divides gradients among the ranks, and forget the whole ones; None: ranks keep them."""
        if not self.inputs.sharding.gradients:
            return None
        parts = gradient_parts(params)
        self.b.forget(parts)
        blocks = {p.grad: p.param.block for p in params.values() if p.grad in parts}
        return Scatter(parts, blocks, self.b, self.scalars, self.inputs.world_size)

    def accumulated(
        self,
        program: Program,
        gradients: Mapping[Value, Value],
        params: Mapping[Value, ParamInfo],
        scatter: Scatter | None,
    ) -> list[Program]:
        """Return the programs of the micro-steps of an optimizer step, made of `program`, in order of their first run.

        The first micro-step writes what a step collects; the others add to it.
        """
        inputs, b = self.inputs, self.b
        first, following = accumulate(program, b, self.scalars, scatter.parts if scatter else ())
        variants = [self.passed("accumulate", program, p) for p in (first, following)[: inputs.grad_accum_steps]]
        if scatter:
            variants = [self.passed("scatter", p, scatter(p)) for p in variants]
        if inputs.world_size > 1:
            *_, final = variants
            summed = {p: g for p, g in gradients.items() if not scatter or g not in scatter.parts}
            parts = {} if scatter else gradient_parts(params)
            variants.append(self.passed("reduce", final, reduce(final, summed, parts, b, inputs.world_size)))
        by_kind = {MicroStep(p.first, p.last): p for p in variants}
        steps = [by_kind[kind] for kind in micro_step_counts(inputs.grad_accum_steps, inputs.world_size)]
        return steps[:1] if program.purpose == "report" else steps

    def pending(
        self, micro: Sequence[Program], programs: Programs, readings: frozenset[Value]
    ) -> tuple[list[Program], Program, Program, dict[Value, Value]]:
        """Change states that a skipped step must leave unchanged in pending copies, which the update commits.

        Return the micro-steps, the evaluation, the update, and {state: copy}.
        """
        evaluate, update, b = programs.evaluate, programs.update, self.b
        states = states_to_commit(micro, evaluate, update, readings)
        copies = {v: b.state(f"pending.{v.name}", v.shape, v.dtype, None) for v in states}
        if not copies:
            return [*micro], evaluate, update, copies

        def on(program: Program, *, begins: bool) -> Program:
            return self.passed("pending", program, on_copies(program, copies, b, begins=begins))

        micro, evaluate = [on(program, begins=program.first) for program in micro], on(evaluate, begins=True)
        with b.record("update") as commits:
            for state, copy in copies.items():
                b.emit("commit", programs.clip_coef, copy, state, outs=[state])
        committing = replace(update, ops=(*update.ops, *commits))
        return micro, evaluate, self.passed("pending", update, committing), copies

    def variants(self, programs: Sequence[Program]) -> tuple[dict[int, Value], dict[str, tuple[Program, ...]]]:
        """Return {documents: their cu_seqlens input}, and for each program that reads documents its variants."""
        whole = self.batch.cu_seqlens
        bounds = smaller_bounds(self.inputs.max_documents, self.inputs.batch_size)
        shorter = {n: self.b.input(f"{whole.name}@{n}", (n + 1,), whole.dtype) for n in bounds}
        variants: dict[str, tuple[Program, ...]] = {}
        for program in programs if shorter else ():
            found = for_fewer(program, whole, shorter.values())
            for input, fewer in zip(shorter.values(), found, strict=False):  # none if it does not read the whole
                refuse_sizes_by_documents(fewer, input, self.inputs.ops)
                check_collectives(program, self.passed("documents", program, fewer))
                variants[program.name] = (*variants.get(program.name, ()), fewer)
        return shorter, variants


def _check_on_host(values: Sequence[object]) -> None:
    """Raise ProgramError unless these are values that the host can hold."""
    if not values:
        raise ProgramError("returned nothing; raise ConfigError if a run has nothing to hold")
    for value in values:
        if not isinstance(value, Value) or value.role not in ("param", "grad", "state") or value.collects:
            what = "a collecting state" if isinstance(value, Value) and value.collects else f"{value!r:.80}"
            raise ProgramError(f"returned {what}, expected params, gradients and states")
