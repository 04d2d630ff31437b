"""NorMuon (arXiv 2510.05491) for the model's matrices, AdamW for all other params: one op each.

A kernel of `normuon` can batch the products of all matrices of equal shape, because one op has all of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import Init, Op, OpDef, OptimizerDef, ParamInfo, TrainedParam, UpdateContext, Value
from surogate_core.api.param_update import UPDATE_ATTRS, emit_update, grads_of, infer_update, updated_in_place

from . import batches
from .iterations import METHODS


class NorMuonOptions(BaseModel):
    """Config keys of the optimizer. `adamw_*` are also those of `adamw`, for the params that it updates."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    normuon_momentum: float = Field(0.95, ge=0, lt=1, description="Decay of the momentum of a matrix.")
    normuon_beta2: float = Field(0.95, ge=0, lt=1, description="Decay of the second moment of a row.")
    normuon_cautious_wd: bool = Field(
        True, description="Weight decay only where it goes the same way as the update; false: everywhere."
    )
    normuon_lr_scale: Literal["match_adamw", "spectral", "paper"] = Field(
        "match_adamw",
        description="Size of an update: `match_adamw` for learning rates of AdamW, `spectral` for those of Muon.",
    )
    normuon_orthogonalization: Literal["polar_express", "newton_schulz"] = Field(
        "polar_express", description="Iterations that orthogonalize the momentum."
    )
    normuon_adapters: bool = Field(
        False, description="Orthogonalize the matrices of adapters too, of experts each by itself; false: AdamW."
    )
    adamw_beta1: float = Field(0.9, ge=0, lt=1, description="Decay of the first moment.")
    adamw_beta2: float = Field(0.999, ge=0, lt=1, description="Decay of the second moment.")
    adamw_epsilon: float = Field(1e-8, gt=0, description="Added to the root of the second moment.")


def is_orthogonalized(p: TrainedParam | ParamInfo, *, adapters: bool) -> bool:
    """Return whether NorMuon updates `p`: a matrix of the model or, with `adapters`, of an adapter."""
    return (p.of_model or adapters) and p.kind == "matrix" and bool(p.matrices)


def update(context: UpdateContext[NorMuonOptions]) -> None:
    """Emit one `normuon` op over the matrices, and one `adamw` op over the other params."""
    chosen = [is_orthogonalized(p, adapters=context.options.normuon_adapters) for p in context.params]
    matrices = [p for p, is_chosen in zip(context.params, chosen, strict=True) if is_chosen]
    others = [p for p, is_chosen in zip(context.params, chosen, strict=True) if not is_chosen]
    if matrices:
        _normuon(context, matrices)
    if others:
        _adamw(context, others)


def _normuon(context: UpdateContext[NorMuonOptions], params: Sequence[TrainedParam]) -> None:
    options = context.options
    momenta = [_state(context, "momentum", p, p.param.shape) for p in params]
    b = context.builder
    rows = [b.state(f"normuon.v.{p.name}", p.param.shape[:1], "fp32", Init(kind="zeros")) for p in params]
    emit_update(
        context,
        "normuon",
        params,
        (momenta, rows),
        rows=tuple(tuple(matrix.rows for matrix in p.matrices) for p in params),
        weight_decay=context.weight_decay,
        momentum=options.normuon_momentum,
        beta2=options.normuon_beta2,
        cautious=options.normuon_cautious_wd,
        lr_scale=options.normuon_lr_scale,
        method=options.normuon_orthogonalization,
    )


def _adamw(context: UpdateContext[NorMuonOptions], params: Sequence[TrainedParam]) -> None:
    options = context.options
    moments = [[_state(context, f"adamw.{name}", p, p.param.shape) for p in params] for name in ("m", "v")]
    emit_update(
        context,
        "adamw",
        params,
        moments,
        weight_decay=tuple(0.0 if p.kind == "vector" else context.weight_decay for p in params),
        beta1=options.adamw_beta1,
        beta2=options.adamw_beta2,
        epsilon=options.adamw_epsilon,
    )


def _state(context: UpdateContext[NorMuonOptions], name: str, p: TrainedParam, shape: Sequence[int]) -> Value:
    dtype = "fp64" if p.master.dtype == "fp64" else context.precision.optimizer_state
    return context.builder.state(f"normuon.{name}.{p.name}", shape, dtype, Init(kind="zeros"))


def flops(op: Op) -> int:
    """Return those of the products of bf16 matrices, of which symmetric ones are computed in part."""
    return len(METHODS[op.attrs["method"]].coefficients) * sum(map(batches.flops, _shapes(op)))


def traffic(op: Op) -> int:
    """Return the bytes of the products. They take less time than the arithmetic."""
    return len(METHODS[op.attrs["method"]].coefficients) * sum(map(batches.traffic, _shapes(op)))


def passes(op: Op) -> int:
    """Return the bytes of the element-wise kernels: every value once, and the bf16 matrices of the products five times.

    Their kernels write these matrices, read and write them to normalize, and read them for the rows and for the update.
    """
    return sum(v.nbytes for v in (*op.ins, *op.outs)) + 2 * 5 * sum(grad.size for grad in grads_of(op))


def _shapes(op: Op) -> Iterator[batches.Shape]:
    """Yield the shape of each logical matrix."""
    for grad, parts in zip(grads_of(op), op.attrs["rows"], strict=True):
        for rows in parts:
            yield batches.Shape(rows, grad.shape[1])


NORMUON_OP = OpDef(
    kind="normuon",
    infer=infer_update,
    attrs={
        **UPDATE_ATTRS,
        "rows": tuple,
        "weight_decay": float,
        "momentum": float,
        "beta2": float,
        "cautious": bool,
        "lr_scale": str,
        "method": str,
    },
    reference="surogate_optim_normuon.reference:normuon",
    flops=flops,
    traffic=traffic,
    passes=passes,
    math=lambda op: "bf16",
    may_overwrite=updated_in_place,
    zero_copy=0.2,  # not measured; as adamw_8bit before its lanes accessed whole sectors (words.cuh)
)

NORMUON = OptimizerDef(
    name="normuon",
    summary="NorMuon for matrices, orthogonalized each by itself; AdamW for all other params",
    options=NorMuonOptions,
    update=update,
    granularity=lambda p: p.param.size if is_orthogonalized(p, adapters=False) else 1,  # ranks divide none of adapters
)
