"""The LM head of a program by FP8 products (`fp8_lm_head`), in place of the standard op."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from surogate_core.api import ConfigError, LowerContext, ParamInfo, Program

from .formats import MULTIPLE
from .lowering import Settings
from .quantizers import Quantizers

KINDS = ("lm_head_ce", "lm_head_ce_grads")
"""The standard ops that have an FP8 form."""

KEY = "fp8_lm_head: true"
REMEDY = "Remove the key."


def may_be_head(info: ParamInfo) -> bool:
    """Return whether a param may be the matrix of the head, which an embedding is too where both are tied."""
    return info.of_model and info.kind in ("head", "embedding")


def lower_head(
    program: Program,
    context: LowerContext[Any],
    quantizers: Quantizers,
    settings: Settings,
) -> Program:
    """Return `program` with the head in FP8. Raises ConfigError if it has another head, or one that is not served."""
    b, ops = context.builder, []
    _check(program, context)
    for op in program.ops:
        if op.kind not in KINDS:
            ops.append(op)
            continue
        weight, has_dx = op.ins[1], 0 in op.attrs.get("wrt", ())
        trained = context.params[weight].grad is not None
        with b.record(op.phase, op.block) as emitted:
            stored = quantizers.weight(weight, transposed=settings.transposes and not trained)
            ins, attrs = [op.ins[0], stored.copy, *op.ins[2:], stored.scale], {**op.attrs, "fast": settings.fast_fprop}
            if op.kind == "lm_head_ce_grads":
                attrs["fast_dx"] = settings.fast_backward
            if settings.transposes and has_dx:
                ins.append(stored.transposed or b.apply("fp8_transpose", stored.copy, label="weight"))
            b.emit(f"fp8_{op.kind}", *ins, outs=op.outs, accumulate=op.accumulate, **attrs)
        ops += emitted
    return replace(program, ops=tuple(ops))


def _check(program: Program, context: LowerContext[Any]) -> None:
    definitions = context.builder.ops
    heads = [op for op in program.ops if "head" in definitions[op.kind].param_kinds.values()]
    if not heads:
        raise ConfigError(f"{KEY}: the loss of this run multiplies no LM head. {REMEDY}")
    for op in heads:
        if op.kind not in KINDS:
            raise ConfigError(
                f"{KEY}: the head of this run's loss is {op.kind}, and only {KINDS[0]}, that of the cross-entropy of "
                f"the next token, is computed in FP8. {REMEDY}"
            )
        tokens, chunks = op.ins[0].shape[0], int(op.attrs["chunks"])
        for size, what, remedy in (
            (op.ins[1].shape[0], f"rows in {op.ins[1].name}, the vocabulary", REMEDY),
            (op.ins[1].shape[1], f"columns in {op.ins[1].name}", REMEDY),
            (tokens // chunks, f"tokens in each of {chunks} chunks of the LM head", "Change lmhead_chunks."),
        ):
            if size % MULTIPLE:
                raise ConfigError(f"{KEY}: FP8 products need a multiple of {MULTIPLE} {what}, got {size}. {remedy}")
