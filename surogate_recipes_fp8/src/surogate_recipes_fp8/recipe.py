"""The `fp8-hybrid` recipe: products of the blocks in FP8, E4M3 forward and E5M2 for gradients, with delayed scaling.

A tensor is scaled by the largest magnitude that it had in the last `fp8_amax_history` optimizer steps. All micro-steps
of a step share these scales, and the update renews them. Three cases have no history:

- Weights: the update knows their magnitude, so they are scaled exactly and quantized once a step; frozen ones once.
- The first step of a run, and after it was skipped the next: every tensor is scaled by itself (`Programs.calibrate`).
- Evaluation before that: the same. Later evaluations use the scales of the training and record nothing.

With `fp8_lm_head`, so are the products of the LM head, which have no history either (`head_ops.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from surogate_core.api import (
    DeviceInfo,
    LowerContext,
    LoweringDef,
    ParamInfo,
    Precision,
    PrecisionRequest,
    Program,
    Programs,
    RecipeDef,
    Refusal,
    Support,
    Value,
)
from surogate_core.api.products import (
    QuantizedWeights,
    SkippedBlocks,
    is_block_matrix,
    product_operands,
    quantized_precision,
    quantized_weights,
)

from .formats import LARGEST, MULTIPLE, multiplies_groups, transposes
from .head import lower_head, may_be_head
from .lowering import Scaling, Settings, lower_program
from .numerics import Counts, report
from .quantizers import QuantizedWeight, Quantizers

PRODUCT_ERROR = 0.045
"""Relative rms error of a product of E4M3 operands, each rounded to 2.6 %; of E4M3 and E5M2 operands 0.058."""

POWERS_LAYOUT = "e2m1, ue8m0 for 32"
"""The layout of stored weights that are E2M1 numbers times powers of two (`WeightFormatDef.layout`)."""

BF16 = "use recipe: bf16, without FP8 dtypes"
"""The remedy where FP8 is not available. FP8 dtypes may be asked for under `recipe: bf16` too."""


class Fp8Options(SkippedBlocks):
    """Options of the recipe."""

    fp8_amax_history: Annotated[int, Field(ge=1, le=65536)] = Field(
        1024, description="Optimizer steps whose largest magnitude scales a tensor."
    )
    fp8_fast_accum: Literal["fprop", "all", "none"] = Field(
        "fprop", description="Products whose sums may have fewer bits, which is faster: forward, all, or none."
    )
    fp8_lm_head: bool = Field(False, description="Compute the products of the LM head in FP8 too.")


def precision(request: PrecisionRequest, options: Fp8Options) -> Precision:
    """Return E4M3 and E5M2 operands."""
    return quantized_precision(request, "fp8-hybrid", "e4m3", "e5m2")


def supports(device: DeviceInfo, precision: Precision, options: object = None) -> Support:
    """A GPU must multiply FP8 operands. A CPU is always supported, because it runs the references."""
    if device.sm is not None and device.sm < 89:
        return Support(False, f"FP8 products need SM89 (Ada) or newer, {device.title} is SM{device.sm}; {BF16}")
    return Support(True)


def lower(programs: Programs, context: LowerContext[Fp8Options]) -> Programs:
    """Lower the products of the blocks, and keep scales and FP8 weights up to date."""
    options = context.options
    settings = _settings(programs, context, options)
    quantizers = Quantizers(context.builder, _exact(programs, context))
    _declare_groups(programs, context, quantizers)

    def lowered(program: Program, scaling: Scaling, counts: Counts | None = None) -> Program:
        found = lower_program(program, context, quantizers, settings, scaling, counts)
        return lower_head(found, context, quantizers, settings) if options.fp8_lm_head else found

    micro, calibrate = lowered(programs.micro, "delayed"), lowered(programs.micro, "current")
    history = quantizers.history(options.fp8_amax_history)
    numerics = None
    if context.numerics:
        counts = Counts(context.builder)
        numerics = report(lowered(programs.micro, "delayed", counts), counts, _trained(context, quantizers), history)
    programs = replace(
        programs,
        micro=micro,
        calibrate=replace(calibrate, name="calibrate"),
        evaluate=lowered(programs.evaluate, "fallback"),
        numerics=numerics,
    )
    programs = _with_quantized_weights(programs, context, quantizers)
    return _with_delayed_scales(programs, context, quantizers, history)


def lower_unrecorded(programs: Programs, context: LowerContext) -> Programs:
    """Lower the products of the blocks, every tensor scaled by its own magnitude: for recipes without FP8 states."""
    settings = _settings(programs, context, Fp8Options.model_validate({}))
    quantizers = Quantizers(context.builder, _exact(programs, context))

    def lowered(program: Program, counts: Counts | None = None) -> Program:
        return lower_program(program, context, quantizers, settings, "unrecorded", counts)

    micro, evaluate = lowered(programs.micro), lowered(programs.evaluate)
    numerics = None
    if context.numerics:
        counts = Counts(context.builder)
        numerics = report(lowered(programs.micro, counts), counts, _trained(context, quantizers), history=None)
    return _with_quantized_weights(
        replace(programs, micro=micro, evaluate=evaluate, numerics=numerics), context, quantizers
    )


def reads_amax(info: ParamInfo, precision: Precision, options: Fp8Options) -> bool:
    return is_block_matrix(info) or (options.fp8_lm_head and may_be_head(info))


def _exact(programs: Programs, context: LowerContext) -> frozenset[Value]:
    """Return the stored weights of products of groups of rows whose elements, of two significant bits, E5M2 holds.

    Its exponents span 2^30, those of E4M3 2^16. cuBLASLt multiplies no gradients in E5M2 by weights in E5M2, so weights
    of other products are not among them.
    """
    if context.layout != POWERS_LAYOUT:
        return frozenset()
    groups = [op for op in programs.evaluate.ops if context.builder.ops[op.kind].group_ends is not None]
    return frozenset(op.ins[1] for op in groups if op.ins[1] in context.stored)


def _declare_groups(programs: Programs, context: LowerContext[Fp8Options], quantizers: Quantizers) -> None:
    """Declare the states of all operands, in one order, where a model has products of groups of rows.

    Not every GPU multiplies these in FP8. A checkpoint of one that does is resumed on one that does not, and the other
    way around, so both have the same states.
    """
    if any(context.builder.ops[op.kind].group_ends is not None for op in programs.evaluate.ops):
        every = _weights(programs, context, context.options, groups=True)
        for operand in product_operands(programs.micro, context.builder, every).values():
            quantizers.of(operand)


def _weights(programs: Programs, context: LowerContext, options: Fp8Options, *, groups: bool) -> QuantizedWeights:
    return quantized_weights(programs, context, options, MULTIPLE, "FP8 products", BF16, groups=groups)


def _settings(programs: Programs, context: LowerContext, options: Fp8Options) -> Settings:
    sm = context.target.device.sm if context.target else None
    return Settings(
        weights=_weights(programs, context, options, groups=multiplies_groups(sm)),
        transposes=transposes(sm),
        fast_fprop=options.fp8_fast_accum != "none",
        fast_backward=options.fp8_fast_accum == "all",
    )


# ---------------------------------------------------------------------------------------------------- between the steps


def _with_quantized_weights(programs: Programs, context: LowerContext, quantizers: Quantizers) -> Programs:
    """Quantize all weights in `derive`, and the trained ones again after every update."""
    b, derive, refusals = context.builder, [], []
    for weight in quantizers.weights:
        outs = [weight.copy, *([weight.transposed] if weight.transposed else []), weight.scale]
        both = weight.transposed is not None
        with b.record("derive", weight.weight.block) as emitted:
            if weight.copy.dtype == "e5m2":
                b.emit("fp8_quantize_exact", weight.weight, outs=outs, transposed=both)
                refusals.append(_refusal(weight, context))
            else:
                b.emit("fp8_quantize", weight.weight, outs=outs, dtype="e4m3", scaling="current", transposed=both)
        derive += emitted
    trained = _trained(context, quantizers)
    with b.record("update") as update:
        if trained:
            amax = [context.params[w.weight].amax or b.apply("fp8_amax", w.weight) for w in trained]
            b.emit("fp8_scales", *amax, outs=[w.scale for w in trained], maximum=LARGEST["e4m3"])
        for w in trained:
            b.emit("fp8_quantize", w.weight, w.scale, outs=[w.copy], dtype="e4m3", scaling="given")
    return replace(programs.appending(derive, update), refusals=(*programs.refusals, *refusals))


def _refusal(weight: QuantizedWeight, context: LowerContext) -> Refusal:
    """Emit the count of elements that E5M2 does not hold, for which a run is refused."""
    name = weight.weight.name
    count = context.builder.state(f"fp8.{name}.inexact", (), "int32", None, derived=True)
    context.builder.emit("fp8_inexact", *context.stored[weight.weight], outs=[count])
    return Refusal(
        count,
        f"elements of {name} are no numbers of E5M2, in which FP8 products of experts read MXFP4: the exponents of "
        f"their blocks are more than 28 below the largest. For this model {BF16}.",
    )


def _trained(context: LowerContext, quantizers: Quantizers) -> list[QuantizedWeight]:
    return [w for w in quantizers.weights if context.params[w.weight].grad is not None]


def _with_delayed_scales(programs: Programs, context: LowerContext, quantizers: Quantizers, history: Value) -> Programs:
    """Skip a step in which a tensor was not finite, and renew the scales at the end of the update."""
    b, coef = context.builder, programs.clip_coef
    delayed, (norm,) = quantizers.delayed, programs.update.outputs
    amax, scales = [q.amax for q in delayed], [q.scale for q in delayed]
    with b.record("update") as guard:
        guarded = b.activation("clip_coef", (), "fp32")
        b.emit("fp8_guard", norm, coef, *amax, outs=[norm, guarded])
    with b.record("update") as renew:
        maxima = tuple(q.maximum for q in delayed)
        b.emit("fp8_update", guarded, history, *amax, *scales, outs=[history, *scales, *amax], maxima=maxima)
    ops = []
    for op in programs.update.ops:
        ops.append(replace(op, ins=tuple(guarded if v is coef else v for v in op.ins)) if coef in op.ins else op)
        if coef in op.outs:
            ops += guard
    return replace(programs, update=replace(programs.update, ops=(*ops, *renew)), clip_coef=guarded)


def product_error(precision: Precision, options: object = None) -> float:
    return PRODUCT_ERROR


FP8_HYBRID = RecipeDef(
    name="fp8-hybrid",
    summary="FP8 products, E4M3 forward and E5M2 for gradients, with delayed scaling; everything else in bf16",
    options=Fp8Options,
    precision=precision,
    supports=supports,
    lower=lower,
    reads_amax=reads_amax,
    product_error=product_error,
    kernels_of=("bf16",),
)

E4M3_E5M2 = LoweringDef(
    matmul="e4m3",
    gradient="e5m2",
    summary="FP8 products, every tensor scaled by its own magnitude",
    supports=supports,
    lower=lower_unrecorded,
    product_error=product_error,
)
