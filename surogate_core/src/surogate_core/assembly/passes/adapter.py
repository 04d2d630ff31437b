"""Adapters rewrite the model, fuse ops of its micro-steps, and compute their params from the loaded weights."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from pydantic import BaseModel

from ...api import AdapterContext, WeightMap
from ...errors import ConfigError, ProgramError
from ...origin import blaming
from ...program.op import Program
from ..assembly import ADAPTER_START
from ..draft import Draft


def apply_adapters(draft: Draft) -> Draft:
    """Let the adapters rewrite the forward program. Its outputs are as many as before."""
    forward = draft.programs["forward"]
    count = len(forward.outputs)
    for adapter, options in draft.inputs.adapters:
        adapted = adapter.apply(forward, draft.scalars, _context(draft, options))
        changed = {*adapted.ops} - {*forward.ops}
        read = {v.name for op in changed for v in op.ins}
        refuse_layouts(adapter.name, read, draft.weights, trained=False)
        forward = draft.verified(forward, adapted, (adapter, "apply"))
        if len(forward.outputs) != count:
            with blaming(adapter.origin, "apply"):
                raise ProgramError(f"adapter {adapter.name} returned {len(forward.outputs)} outputs of {count}")
    return draft.having(forward)


def fuse_by_adapters(draft: Draft) -> Draft:
    """Let the adapters fuse ops of the micro-steps."""

    def fused(program: Program) -> Program:
        for adapter, options in draft.inputs.adapters:
            program = draft.verified(program, adapter.fuse(program, options), (adapter, "fuse"))
        return program

    return draft.changing_micro_steps(fused)


def start_adapters(draft: Draft) -> Draft:
    """Record what the adapters compute of the loaded weights, once, in a fresh run. They write params of theirs."""
    b = draft.builder
    declared = {v.name: v for v in b.declared if v.role == "param"}
    of_model = {m.param for m in draft.weights}
    program: Program | None = None
    for adapter, options in draft.inputs.adapters:
        if adapter.start is None:
            continue
        with blaming(adapter.origin, "start"), b.record("start") as emitted:
            adapter.start(declared, _context(draft, options))
            others = [v for op in emitted for v in op.written if v.role != "act"]
            if wrong := [v for v in others if v.role != "param" or v.name in of_model]:
                raise ProgramError(f"writes {wrong[0]!r}, expected params of the adapter alone")
        if emitted:
            ops = (*(program.ops if program else ()), *emitted)
            started = Program(ADAPTER_START, ops, stage="start")
            program = draft.verified(program, started, (adapter, "start"))
    return replace(draft, programs={program.name: program, **draft.programs}) if program else draft


def refuse_layouts(adapter: str, params: Collection[str], weights: Sequence[WeightMap], *, trained: bool) -> None:
    """Raise ConfigError if an adapter changes weights that checkpoints have in another order than params.

    trained: it trains them itself, so that its files would hold them. Beside stacks of experts that a parameter of
    transformers holds it may have params of its own.
    """
    read = [m for m in weights if m.param in params]
    for stored, tensor in [(m, tensor) for m in read for tensor in m.tensors if tensor.layout]:
        if trained:
            why = "and in adapters it would not be"
        elif not tensor.leading:
            why = "a layout without `leading`, and in adapters it would not be"
        elif not stored.parameter:
            why = "and its weight map names no `parameter` by which adapters find it"
        else:
            continue
        raise ConfigError(
            f"adapter {adapter}: {tensor.name} is {tensor.layout} in checkpoints, {why}. Leave its module out, or "
            "train without an adapter."
        )


def _context(draft: Draft, options: BaseModel) -> AdapterContext[BaseModel]:
    trained = tuple(m for m in draft.weights if m.trained)
    untrained = tuple(m for m in draft.weights if not m.trained)
    precision = draft.inputs.precision
    return AdapterContext(
        builder=draft.builder, precision=precision, weights=trained, options=options, untrained=untrained
    )
