"""A draft: the programs of a run on their way through the passes (`assemble.PASSES`)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from ..api import BatchInputs, Head, Metric, Numerics, ParamInfo, Programs, Refusal, Scalars, WeightFormatDef, WeightMap
from ..program.builder import Builder
from ..program.op import Op, Program
from ..program.value import Value
from .assembly import Reported
from .inputs import PlanInputs
from .staging import Staged
from .step_inputs import declare_batch, declare_scalars
from .verifier import Blamed, Step, Verifier


@dataclass(frozen=True)
class Pass(Step):
    """A step from a model to the programs of a run. Called with a draft, it returns the next one.

    run  does it. Reports each program that it makes (`Draft.verified`).
    if_  whether a run needs it
    """

    run: Callable[[Draft], Draft] = field(repr=False)
    if_: Callable[[Draft], bool] = field(default=lambda draft: True, repr=False)

    def __call__(self, draft: Draft) -> Draft:
        ran = draft.verifier.passes
        before = len(ran)
        if self.if_(draft):
            draft = self.run(replace(draft, running=self))
        return replace(draft, latest=tuple(one.program for one in ran[before:]))


@dataclass(frozen=True, kw_only=True, eq=False)
class Draft:
    """The programs of a run so far, and what passes leave for later ones. No pass changes a draft: it returns another.

    Drafts share `builder` and `verifier` with those that they were made of, up to the last fork.

    running     the pass that runs
    latest      names of the programs that the pass before it has made
    programs    by name, from the last pass of the recipe on in the order in which they first run
    weights     the model's weight maps

    From build and loss to differentiate:

    head        what the model gives to compute logits from
    model       the forward program without loss and adapter
    metrics     what the run reports, the loss first
    stand_in    stands for the last hidden state of the reference until its ops are there; None: the loss reads none
    copies      {param: the state that holds its copy}, of a frozen reference
    cached_reference
                numbers of documents that evaluations keep for the loss
    totals      {reported value: the state that holds it after an optimizer step}
    evaluated   {reported or kept value: the state that holds it after an evaluated batch}

    For the programs and the loop:

    reported    what the loop reads of `metrics`
    cached      the state of `cached_reference`, if there is one
    grad_norm   a state: the norm of all gradients
    gradients   {param: its gradient}
    params      what is known of every param, by its value
    states      what the optimizer declared
    clip_coef   what clips the gradients; see `Programs`
    stored      {frozen param: the states that hold it in the run's weight format}
    storing     the ops of `derive` that write these
    numerics    the recipe's report, if the run asks for it
    refusals    what ends the run when its weights are loaded

    Of one plan:

    on_host     the params, gradients and states that offload strategies hold on the host
    pending     copies of states that each step writes again
    staging     the programs of `derive` that read staged params
    parts       {whole weight that ranks divide: this rank's part}
    places      {declared value: what has taken its place in the programs}
    cu_seqlens  {`Program.documents`: the input that variants for so many documents read}
    variants    {name of a program: the same program for fewer documents}
    """

    inputs: PlanInputs
    builder: Builder
    verifier: Verifier
    batch: BatchInputs
    scalars: Scalars
    running: Pass | None = None
    latest: tuple[str, ...] = ()
    programs: Mapping[str, Program] = field(default_factory=dict)
    weights: tuple[WeightMap, ...] = ()
    head: Head | None = None
    model: Program | None = None
    metrics: tuple[Metric, ...] = ()
    stand_in: Value | None = None
    copies: Mapping[Value, Value] = field(default_factory=dict)
    cached_reference: Value | None = None
    totals: Mapping[Value, Value] = field(default_factory=dict)
    evaluated: Mapping[Value, Value] = field(default_factory=dict)
    reported: tuple[Reported, ...] = ()
    cached: tuple[Value, ...] = ()
    grad_norm: Value | None = None
    gradients: Mapping[Value, Value] = field(default_factory=dict)
    params: Mapping[Value, ParamInfo] = field(default_factory=dict)
    states: Sequence[Value] = ()
    clip_coef: Value | None = None
    stored: Mapping[Value, Sequence[Value]] = field(default_factory=dict)
    storing: frozenset[Op] = frozenset()
    numerics: Numerics | None = None
    refusals: tuple[Refusal, ...] = ()
    on_host: tuple[Value, ...] = ()
    pending: tuple[Value, ...] = ()
    staging: tuple[Staged, ...] = ()
    parts: Mapping[Value, Value] = field(default_factory=dict)
    places: Mapping[Value, Value] = field(default_factory=dict)
    cu_seqlens: Mapping[int, Value] = field(default_factory=dict)
    variants: Mapping[str, tuple[Program, ...]] = field(default_factory=dict)

    @staticmethod
    def of(inputs: PlanInputs, verifier: Verifier) -> Draft:
        """Return the draft of a run without programs: the values that the loop writes are declared."""
        b = Builder(inputs.ops, inputs.precision.model, inputs.sharding.parts if inputs.sharding.states else 1)
        batch, scalars = declare_batch(b, inputs), declare_scalars(b, inputs)
        return Draft(inputs=inputs, builder=b, verifier=verifier, batch=batch, scalars=scalars)

    def forked(self, inputs: PlanInputs) -> Draft:
        """Return this draft for a plan with `inputs`. What its passes declare and report, this one does not know."""
        return replace(self, inputs=inputs, builder=self.builder.forked(), verifier=self.verifier.forked())

    # ----------------------------------------------------------------------------------------------------- programs

    def verified(self, before: Program | None, after: Program, by: Blamed | None = None) -> Program:
        """Return `after`, which the running pass has made of `before`, or of nothing.

        It is verified with the plan. `by`: the plugin's definition and function that made it; None: core.
        """
        assert self.running is not None
        return self.verifier(self.running, before, after, by)

    def having(self, *programs: Program) -> Draft:
        """Return the draft with `programs` in place of those of their names, or after all."""
        return replace(self, programs={**self.programs, **{program.name: program for program in programs}})

    def having_instead(self, of: Program, programs: Iterable[Program]) -> Draft:
        """Return the draft with `programs` where it has the program `of`."""
        places = ((program,) if program.name != of.name else programs for program in self.programs.values())
        return replace(self, programs={program.name: program for place in places for program in place})

    @property
    def micro_steps(self) -> list[Program]:
        """The programs of micro-steps, in the order in which they first run."""
        return [program for program in self.programs.values() if program.stage == "micro"]

    def changing_micro_steps(self, change: Callable[[Program], Program]) -> Draft:
        """Return the draft with `change(program)` in place of each micro-step.

        It is called first for the one that trains: activations are numbered in this order.
        """
        changed = [change(p) for p in sorted(self.micro_steps, key=lambda p: p.purpose != "train")]
        return self.having(*changed)

    @property
    def weight_format(self) -> WeightFormatDef:
        """The format of frozen weights, of a run that has one."""
        assert self.inputs.weight_format is not None
        return self.inputs.weight_format[0]

    @property
    def family(self) -> Programs:
        """The programs as plugins get them: before micro-steps are told apart by what they accumulate."""
        found, numerics = self.programs, self.numerics
        assert self.clip_coef is not None
        return Programs(
            micro=found["micro"],
            evaluate=found["evaluate"],
            update=found["update"],
            clip_coef=self.clip_coef,
            derive=found["derive"],
            start=found["start"],
            calibrate=found.get("calibrate"),
            numerics=numerics and replace(numerics, micro=found["report"]),
        )
