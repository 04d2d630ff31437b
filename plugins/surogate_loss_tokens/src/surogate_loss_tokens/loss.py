"""The loss `tokens`: cross-entropy with weights, label smoothing and z-loss.

Each term is a mean over the labels of the step, weights or not: a label of weight 0.5 counts half of one of weight 1,
whatever the weights of others are.
"""

from __future__ import annotations

from collections.abc import Sequence

from pydantic import BaseModel, ConfigDict, Field

from surogate_core.api import Column, Loss, LossContext, LossDef, Metric

WEIGHT = Column("weight", "token")
"""The column of a dataset type with weights: of each token, as the label of the token before it."""


class TokensOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    tokens_z_loss: float = Field(
        0.0, ge=0, description="Adds this factor times the squared log of the softmax's denominator; 1e-4 is usual."
    )
    tokens_label_smoothing: float = Field(
        0.0, ge=0, lt=1, description="Part of the target's probability that is spread over the whole vocabulary."
    )
    tokens_weights: bool = Field(
        False, description="Multiply the loss of each label by its number in the column `weight` of the dataset type."
    )


def columns(options: TokensOptions) -> Sequence[Column]:
    return [WEIGHT] if options.tokens_weights else []


def build(context: LossContext) -> Loss:
    b, head, batch = context.builder, context.head, context.batch
    options: TokensOptions = context.options
    labels = b.emit("lm_head_tokens", head.x, head.weight, batch.targets, chunks=batch.lmhead_chunks, **head.attrs)
    weights = [batch.columns[column.name] for column in columns(options)]
    sums = b.emit(
        "token_loss",
        *labels,
        batch.loss_scale,
        *weights,
        smoothing=options.tokens_label_smoothing,
        z=options.tokens_z_loss,
    )
    loss, z_loss, cross_entropy = map(Metric, ("loss", "z_loss", "cross_entropy"), sums)
    return Loss([loss, z_loss] if options.tokens_z_loss else [loss], metrics=[cross_entropy])


TOKENS = LossDef(
    name="tokens",
    summary="cross-entropy with weights, label smoothing and z-loss",
    options=TokensOptions,
    build=build,
    columns=columns,
)
