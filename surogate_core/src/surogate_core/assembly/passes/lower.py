"""The recipe chooses the dtypes of products."""

from __future__ import annotations

from dataclasses import replace

from ...api import LowerContext
from ...errors import ConfigError, ProgramError
from ...front_end import called
from ...origin import blaming
from ...program.verify import check_states
from ..draft import Draft


def lower_programs(draft: Draft) -> Draft:
    """Let the recipe lower all programs. It may add the micro-steps `calibrate` and `report`.

    From here on the run has no forward program, and the others in the order in which they first run.
    """
    inputs, before = draft.inputs, draft.family
    context = LowerContext(
        builder=draft.builder,
        target=inputs.target,
        precision=inputs.precision,
        scalars=draft.scalars,
        params=draft.params,
        options=inputs.recipe_options,
        numerics=inputs.numerics,
        stored=draft.stored,
        layout=draft.weight_format.layout if draft.stored else "",
    )
    lowering = inputs.lowering or inputs.recipe
    after = lowering.lower(before, context)
    calibrate, numerics = after.calibrate, after.numerics
    if numerics is None and inputs.numerics:
        raise ConfigError(
            f"{called('numerics')}: {lowering.name} has no numerics report. Leave it out, or choose a recipe "
            "that has one."
        )
    after = replace(
        after,
        calibrate=calibrate and replace(calibrate, name="calibrate", purpose="calibrate"),
        numerics=numerics and replace(numerics, micro=replace(numerics.micro, name="report", purpose="report")),
    )
    pairs = [
        (before.micro, after.micro),
        (before.evaluate, after.evaluate),
        (before.update, after.update),
        (before.derive, after.derive),
        (before.start, after.start),
        *((before.micro, added) for added in after.micro_steps() if added is not after.micro),
    ]
    for was, program in pairs:
        draft.verified(was, program, (lowering, "lower"))
    programs = {program.name: program for program in after.all()}
    return replace(
        draft, programs=programs, clip_coef=after.clip_coef, numerics=after.numerics, refusals=after.refusals
    )


def check_lowered(draft: Draft) -> Draft:
    """Raise ProgramError if the recipe lets a program read a state that nothing has set, or renews no `clip_coef`."""
    lowering, coef = draft.inputs.lowering or draft.inputs.recipe, draft.clip_coef
    assert coef is not None
    with blaming(lowering.origin, "lower"):
        check_states(draft.programs.values())
        if (coef.shape, coef.dtype) != ((), "fp32") or all(coef not in op.outs for op in draft.programs["update"].ops):
            raise ProgramError(f"returned the clip_coef {coef!r}, expected an fp32[] that the update writes")
    return draft
