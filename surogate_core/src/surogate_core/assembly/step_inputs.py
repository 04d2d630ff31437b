"""The values that the training loop writes before a program runs."""

from __future__ import annotations

from ..api import BatchInputs, Scalars
from ..dtypes import wider
from ..program.builder import Builder
from .inputs import PlanInputs
from .lm_head_chunks import lm_head_chunks


def declare_batch(b: Builder, inputs: PlanInputs) -> BatchInputs:
    tokens, precision = inputs.tokens, inputs.precision
    of_logits = wider(precision.model, precision.matmul)
    chunks = lm_head_chunks(inputs.lmhead_chunks, tokens, inputs.dims.vocab_size, of_logits)
    group, columns = inputs.loss.group, inputs.loss.columns(inputs.loss_options)
    groups = ((inputs.max_documents - inputs.batch_size) // group, group) if group else ()  # of each row one is padding
    shapes = {"token": (tokens,), "document": groups}
    return BatchInputs(
        tokens=b.input("tokens", (tokens,), "int32"),
        targets=b.input("targets", (tokens,), "int32"),
        positions=b.input("positions", (tokens,), "int32"),
        cu_seqlens=b.input("cu_seqlens", (inputs.max_documents + 1,), "int32"),
        loss_scale=b.input("loss_scale", (), "fp32"),
        seq_len=inputs.seq_len,
        lmhead_chunks=chunks,
        groups=b.input("groups", (*groups, 2), "int32") if group else None,
        group_scale=b.input("group_scale", (), "fp32") if group else None,
        columns={c.name: b.input(f"column.{c.name}", shapes[c.per], "fp32") for c in columns},
    )


def declare_scalars(b: Builder, inputs: PlanInputs) -> Scalars:
    return Scalars(
        lr=b.input("lr", (), "fp32"),
        step=b.input("step", (), "int32"),
        micro_step=b.input("micro_step", (), "int32"),
        seed=b.input("seed", (), "int64"),
        first_micro_step=b.input("first_micro_step", (), "int32") if inputs.sharding.gradients else None,
    )
