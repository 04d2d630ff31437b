"""Records the programs of a run: each method is a step of `record`, which calls them in order."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from pydantic import BaseModel

from ..api import (
    AdapterContext,
    BatchInputs,
    Head,
    Loss,
    LossContext,
    LowerContext,
    ParamInfo,
    Programs,
    Scalars,
    WeightMap,
)
from ..config.keys import ADAPTER_FLAG
from ..dtypes import DTYPES, wider
from ..errors import ConfigError, DisconnectedError, ProgramError
from ..origin import blaming
from ..program.builder import Builder
from ..program.differentiate import differentiate
from ..program.op import Op, Program
from ..program.passes.dead_code import dead_code
from ..program.passes.evaluation import for_evaluation
from ..program.passes.fuse_adds import fuse_adds
from ..program.value import WEIGHT_LABEL, Value
from ..program.verify import check_states
from .assembly import ADAPTER_START
from .finisher import Finisher
from .inputs import PlanInputs
from .parts import assigned, divided, elements_together, gather_updated, quantize_parts, with_master
from .pass_runner import PassRunner
from .update import record_update, update_flops
from .weight_maps import logical_matrices, param_kind, special_kinds
from .weight_storage import Stored, WeightStorage, read_stored, reading_stored, store_weights


@dataclass(frozen=True)
class Recorder:
    """Records the programs of one run with one builder. `passed` verifies what each pass returns."""

    inputs: PlanInputs
    b: Builder
    passed: PassRunner
    batch: BatchInputs
    scalars: Scalars

    def forked(self, inputs: PlanInputs) -> Finisher:
        """Return what finishes the recorded programs for `inputs`, and leaves this one as it is."""
        return Finisher(inputs, self.b.forked(), self.passed.forked(), self.batch, self.scalars)

    # ------------------------------------------------------------------------------------------ forward and evaluate

    def build(self) -> tuple[Program, Head]:
        """Record the model's forward program, whose outputs are the last hidden state and the model's own losses."""
        model = self.inputs.model
        with self.b.record("forward"):
            head = model.build(self.b, self.inputs.dims, self.batch)
            program = self.b.program("forward", (head.x, *head.losses))
            return self.passed("build", None, program, (model, "build")), head

    def adapt(self, forward: Program, weights: Sequence[WeightMap]) -> Program:
        count = len(forward.outputs)
        for adapter, options in self.inputs.adapters:
            adapted = adapter.apply(forward, self.scalars, self._adapter_context(weights, options))
            changed = {*adapted.ops} - {*forward.ops}
            _refuse_layouts(adapter.name, {v.name for op in changed for v in op.ins}, weights)
            forward = self.passed("adapter", forward, adapted, (adapter, "apply"))
            if len(forward.outputs) != count:
                with blaming(adapter.origin, "apply"):
                    raise ProgramError(f"adapter {adapter.name} returned {len(forward.outputs)} outputs of {count}")
        return forward

    def _adapter_context(self, weights: Sequence[WeightMap], options: BaseModel) -> AdapterContext[BaseModel]:
        return AdapterContext(builder=self.b, precision=self.inputs.precision, weights=weights, options=options)

    def loss(self, forward: Program, head: Head) -> tuple[Program, Loss, Value | None, Mapping[Value, Value]]:
        """Append the run's loss to the model's forward program. The outputs are its terms and the model's own losses.

        Also return what stands for the last hidden state of the reference, if the loss reads one (`with_reference`),
        and {param: the state that holds its copy}, of a frozen reference.
        """
        definition, options = self.inputs.loss, self.inputs.loss_options
        x = Value("reference", head.x.shape, head.x.dtype, "input") if definition.reference(options) else None
        frozen, adapts = self.inputs.frozen_reference, bool(self.inputs.adapters)
        if frozen and (adapts or not x):
            why = "an adapter leaves the model as it is" if adapts else f"loss: {definition.name} reads no reference"
            raise ConfigError(f"reference: frozen would copy the weights, but {why}. Remove the key.")
        if x and not (adapts or frozen):
            raise ConfigError(
                f"loss: {definition.name} compares with the model as it is without the adapter, but this run trains no "
                f"adapter. Set {ADAPTER_FLAG.key}: true, or reference: frozen or cached, or choose another loss."
            )
        copies = self._copies(forward, head) if frozen else {}
        reference = replace(head, x=x, weight=copies.get(head.weight, head.weight), losses=()) if x else None
        context = LossContext(builder=self.b, head=head, reference=reference, batch=self.batch, options=options)
        with self.b.record("forward") as emitted:
            loss = definition.build(context)
        if definition.cached_reference and not loss.cached_reference:
            raise definition.failed("build", "returned no cached_reference, the numbers of that column of LossDef")
        outputs = (*(term.value for term in loss.terms), *head.losses)
        after = replace(forward, ops=(*forward.ops, *emitted), outputs=outputs)
        return self.passed("loss", forward, after, (definition, "build")), loss, x, copies

    def _copies(self, model: Program, head: Head) -> dict[Value, Value]:
        read = dict.fromkeys((*(v for op in model.ops for v in op.ins if v.role == "param"), head.weight))
        return {v: self.b.state(f"reference.{v.name}", v.shape, v.dtype, None, label=WEIGHT_LABEL) for v in read}

    def with_reference(
        self, forward: Program, model: Program, stand_in: Value, copies: Mapping[Value, Value]
    ) -> Program:
        """Run the model without adapters, or with `copies` of its params, before `forward`, whose loss reads it."""
        places = dict(copies)
        ops: list[Op] = []
        for op in dead_code(replace(model, outputs=model.outputs[:1]), self.inputs.ops).ops:
            with self.b.record("reference", op.block):
                fresh = [self.b.activation(v.label, v.shape, v.dtype, room=v.room) for v in op.outs]
            places |= zip(op.outs, fresh, strict=True)
            ops.append(op.on(places).changed(phase="reference"))
        places = {stand_in: places[model.outputs[0]]}
        return self.passed("reference", forward, replace(forward, ops=(*ops, *(op.on(places) for op in forward.ops))))

    def refuse_trained_reference(self, forward: Program, trained: Collection[Value]) -> None:
        """Raise ConfigError if the model without its adapter changes, because some of its own params are trained."""
        read = {value for op in forward.ops if op.phase == "reference" for value in op.ins}
        if changed := [param.name for param in trained if param in read]:
            raise ConfigError(
                f"loss: {self.inputs.loss.name} compares with the model as it is without the adapter, but this run "
                f"trains params of the model itself: {', '.join(changed[:3])}. Let the adapter train none."
            )

    def evaluation(self, forward: Program, totals: Mapping[Value, Value]) -> Program:
        """Return the evaluation program, which writes each reported value to its state in `totals`."""
        program = self.passed("evaluation", forward, for_evaluation(forward, self.inputs.ops))
        return self._reporting(program, totals)

    def _reporting(self, program: Program, totals: Mapping[Value, Value]) -> Program:
        """Return `program` with reported values written to their states, without what only computes others."""
        found = self.passed("outputs", program, replace(program, outputs=tuple(totals)).on(totals))
        return self.passed("dead_code", found, dead_code(found, self.inputs.ops))

    # ---------------------------------------------------------------------------------------------------- the programs

    def differentiated(
        self, forward: Program, totals: Mapping[Value, Value], weights: Sequence[WeightMap]
    ) -> tuple[Program, dict[Value, Value]]:
        """Return the program of a micro-step, which writes reported values to `totals`, and {param: gradient}."""
        program, gradients = self._differentiated(forward, weights)
        program = self._reporting(program, totals)
        program = self.passed("fuse_adds", program, fuse_adds(program, self.inputs.ops))
        return self._in_chunks(program), gradients

    def _in_chunks(self, program: Program) -> Program:
        chunks = self.inputs.attn_bwd_chunks
        if chunks == 1:
            return program
        ops = tuple(
            op.changed(attrs={**op.attrs, "chunks": chunks}) if self.inputs.ops[op.kind].takes_chunks else op
            for op in program.ops
        )
        if ops == program.ops:
            raise ConfigError(
                f"attn_bwd_chunks: {chunks}: model {self.inputs.model.name} has no attention whose backward pass can "
                "run in chunks. Remove the key."
            )
        return self.passed("chunks", program, replace(program, ops=ops))

    def _differentiated(self, forward: Program, weights: Sequence[WeightMap]) -> tuple[Program, dict[Value, Value]]:
        inputs = self.inputs
        of_model = {m.param: m for m in weights}

        def trainable(param: Value) -> bool:
            stored = of_model.get(param.name)
            return not inputs.adapters or any(adapter.trainable(param, stored, o) for adapter, o in inputs.adapters)

        before = Program("micro", forward.ops, forward.outputs, stage="micro")
        try:
            program, gradients = differentiate(before, before.outputs, self.b, trainable, inputs.precision.param_grad)
        except DisconnectedError as error:
            # The fault of the rule that gave no gradient, else of the plugin that recorded the forward program last.
            last, function = (inputs.adapters[-1][0], "trainable") if inputs.adapters else (inputs.model, "build")
            if inputs.adapters and {v.name for v in forward.values() if v.role == "param"} <= of_model.keys():
                function = "apply or trainable"  # neither adds a param nor trains one
            rule = inputs.ops[error.cut_by].origin if error.cut_by else None
            with blaming(rule or last.origin, "vjp" if rule else function):
                raise error
        for adapter, _ in inputs.adapters:
            _refuse_layouts(adapter.name, {v.name for v in gradients}, weights)
        return self.passed("differentiate", forward, program), gradients

    def params(
        self, forward: Program, gradients: Mapping[Value, Value], weights: Sequence[WeightMap]
    ) -> dict[Value, ParamInfo]:
        """Return what is known of every param, and declare the masters of the trained ones.

        `master_dtype` applies to the model's own weights of its dtype. An adapter's params, and those that the model
        declares in another dtype, have the one that they are trained in, so a wider master may gain something and a
        narrower one would only lose precision.
        """
        asked, stored = self.inputs.precision.master, {m.param: m for m in weights}
        special = special_kinds(forward, self.inputs.ops)
        found = {
            param: ParamInfo(
                param=param,
                of_model=param.name in stored and not stored[param.name].new,
                kind=special.get(param) or param_kind(param, stored.get(param.name)),
                matrices=logical_matrices(param, stored.get(param.name), self.b.stack_of(param)),
                grad=gradients.get(param),
            )
            for param in self.b.declared
            if param.role == "param"
        }
        trained = [info for info in found.values() if info.grad is not None]
        together = {info.param: elements_together(info, self.inputs) for info in trained}
        owners = self._owners([info for info in trained if together[info.param] == info.param.size])
        for info in trained:
            of_run = info.of_model and info.param.dtype == self.inputs.precision.model
            dtype = asked if of_run else wider(info.param.dtype, asked)
            if together[info.param]:
                info = divided(info, self.inputs.sharding, self.b, owners.get(info.param))
            found[info.param] = with_master(info, dtype, self.b)
        return found

    def _owners(self, whole: Sequence[ParamInfo]) -> dict[Value, int]:
        """Return {param: the rank that updates it}. What the update of a param takes depends on its shapes alone."""
        flops: dict[tuple[object, ...], int] = {}

        def work(info: ParamInfo) -> int:
            form = (info.param.form, *(matrix.rows for matrix in info.matrices))
            if form not in flops:
                b = self.b.forked()
                flops[form] = update_flops(b, self.inputs, self.scalars, with_master(info, info.param.dtype, b))
            return flops[form]

        return assigned(whole, work, self.inputs.sharding.parts)

    def programs(
        self,
        micro: Program,
        evaluate: Program,
        params: dict[Value, ParamInfo],
        copies: Mapping[Value, Value],
        norm: Value,
    ) -> tuple[Programs, Sequence[Value]]:
        """Record the other programs of a run. Return all of them, and the states of the optimizer.

        Adds to `params` which magnitudes the optimizer computes.
        """
        with self.b.record("derive"):
            derive = self.passed("derive", None, self.b.program("derive", stage="derive"))
        update = record_update(self.b, self.inputs, self.scalars, params.values(), norm)
        for measured in update.measured:
            param = measured.param.inside or measured.param
            params[param] = replace(params[param], amax=measured.amax)
        self.passed("optimizer", None, update.program, (self.inputs.optimizer, "update"))
        programs = Programs(
            micro=micro,
            evaluate=evaluate,
            update=update.program,
            clip_coef=update.clip_coef,
            derive=derive,
            start=self._start(params, copies),
        )
        with blaming(self.inputs.optimizer.origin, "update"):
            check_states([programs.start, programs.update])
        return programs, update.states

    def lowered(self, programs: Programs, params: Mapping[Value, ParamInfo]) -> tuple[Programs, WeightStorage | None]:
        """Apply the recipe, and store frozen matrices in the run's weight format, if it has one. Return them too."""
        if self.inputs.weight_format is None:
            return self._lowered(programs, params, {}), None
        format, options = self.inputs.weight_format
        storage = store_weights(params, self.inputs.stored_kinds, format, options, self.b)
        writing = replace(programs.derive, ops=tuple(storage.writing))
        programs = replace(programs, derive=self.passed("store", programs.derive, writing, (format, "quantize")))
        programs = self._lowered(programs, params, storage.states, format.layout)
        before = {p.name: p for p in programs.all()}
        after = read_stored(programs, storage, self.b)
        for program in after.all():
            if program is not before[program.name]:
                by = None if program.stage == "derive" else (format, "dequantize")
                self.passed("read stored", before[program.name], program, by)
        return after, storage

    def _lowered(
        self, programs: Programs, params: Mapping[Value, ParamInfo], stored: Stored, layout: str = ""
    ) -> Programs:
        """Apply the recipe, then remove what it left without a reader."""
        inputs = self.inputs
        context = LowerContext(
            builder=self.b,
            target=inputs.target,
            precision=inputs.precision,
            scalars=self.scalars,
            params=params,
            options=inputs.recipe_options,
            numerics=inputs.numerics,
            stored=stored,
            layout=layout,
        )
        lowering = inputs.lowering or inputs.recipe
        after = lowering.lower(programs, context)

        def finished(program: Program, before: Program = programs.micro) -> Program:
            program = self.passed("lower", before, program, (lowering, "lower"))
            return self.passed("dead_code", program, dead_code(program, inputs.ops))

        calibrate, numerics = after.calibrate, after.numerics
        if numerics is None and inputs.numerics:
            raise ConfigError(
                f"numerics_report_steps: {lowering.name} has no numerics report. Remove the key, or choose a recipe "
                "that has one."
            )
        lowered = replace(
            after,
            micro=finished(after.micro),
            evaluate=finished(after.evaluate, programs.evaluate),
            update=finished(after.update, programs.update),
            derive=finished(after.derive, programs.derive),
            start=finished(after.start, programs.start),
            calibrate=calibrate and finished(replace(calibrate, name="calibrate", purpose="calibrate")),
            numerics=numerics
            and replace(numerics, micro=finished(replace(numerics.micro, name="report", purpose="report"))),
        )
        update = quantize_parts(lowered.update, params.values(), inputs.sharding, self.b)
        if update is not lowered.update:
            lowered = replace(lowered, update=self.passed("quantize parts", lowered.update, update))
        with blaming(lowering.origin, "lower"):
            check_states(lowered.all())
            coef = lowered.clip_coef
            if (coef.shape, coef.dtype) != ((), "fp32") or all(coef not in op.outs for op in lowered.update.ops):
                raise ProgramError(f"returned the clip_coef {coef!r}, expected an fp32[] that the update writes")
        return lowered

    def _start(self, params: Mapping[Value, ParamInfo], copies: Mapping[Value, Value]) -> Program:
        """Record the masters and the copies from the params.

        A param that is wider than its master becomes what the master holds, as after every update.
        """
        with self.b.record("start"):
            for p in params.values():
                if p.master is not None and p.master.role == "state":
                    param = p.part or p.param
                    self.b.emit("cast", param, outs=[p.master], dtype=p.master.dtype)
                    if DTYPES[p.master.dtype].bits < DTYPES[p.param.dtype].bits:
                        self.b.emit("cast", p.master, outs=[param], dtype=p.param.dtype)
                        gather_updated([p], self.inputs.sharding, self.b)
            for param, copy in copies.items():
                self.b.emit("cast", param, outs=[copy], dtype=copy.dtype)
            return self.passed("start", None, self.b.program("start", stage="start"))

    def adapter_start(self, weights: Sequence[WeightMap], stored: WeightStorage | None) -> Program | None:
        """Record what the adapters compute of the loaded weights, which may be stored in a weight format."""
        declared = {v.name: v for v in self.b.declared if v.role == "param"}
        of_model = {m.param for m in weights}
        program: Program | None = None
        for adapter, options in self.inputs.adapters:
            if adapter.start is None:
                continue
            with blaming(adapter.origin, "start"), self.b.record("start") as emitted:
                adapter.start(declared, self._adapter_context(weights, options))
                others = [v for op in emitted for v in op.written if v.role != "act"]
                if wrong := [v for v in others if v.role != "param" or v.name in of_model]:
                    raise ProgramError(f"writes {wrong[0]!r}, expected params of the adapter alone")
            if emitted:
                ops = (*(program.ops if program else ()), *emitted)
                started = Program(ADAPTER_START, ops, stage="start")
                program = self.passed("adapter start", program, started, (adapter, "start"))
        if program is None or stored is None:
            return program
        return self.passed("read stored", program, reading_stored(program, stored, self.b))

    # --------------------------------------------------------------------------------------------------- micro-steps

    def fused(self, program: Program) -> Program:
        """Let the adapters fuse ops of a micro-step."""
        for adapter, options in self.inputs.adapters:
            fused = adapter.fuse(program, options)
            program = self.passed("fuse", program, fused, (adapter, "fuse"))
        return program


def _refuse_layouts(adapter: str, params: Collection[str], weights: Sequence[WeightMap]) -> None:
    """Raise ConfigError if an adapter changes weights that checkpoints have in another order than params."""
    for tensor in (tensor for m in weights if m.param in params for tensor in m.tensors if tensor.layout):
        raise ConfigError(
            f"adapter {adapter}: {tensor.name} is {tensor.layout} in checkpoints, and in adapters it would not be. "
            "Leave its module out, or train without an adapter."
        )
