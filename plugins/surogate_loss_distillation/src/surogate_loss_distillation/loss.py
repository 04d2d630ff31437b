"""The loss `distillation`: cross-entropy and the divergence from a teacher, each a mean over the labels of the step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator

from surogate_core.api import Column, ConfigError, Figure, Loss, LossContext, LossDef, PrepareContext, Prepared


class DistillationOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    distillation_teacher: str = Field(
        "", description="The teacher: directory or hub id of a model with the same tokenizer."
    )
    distillation_top_k: int = Field(
        32, ge=1, description="Tokens whose probabilities are kept of the teacher; the others count together."
    )
    distillation_temperature: float = Field(
        1.0, gt=0, description="Divides the logits of teacher and student, for the divergence alone."
    )
    distillation_weight: float = Field(
        0.5, ge=0, le=1, description="Weight of the divergence; the rest is that of the cross-entropy."
    )
    distillation_kl: Literal["forward", "reverse"] = Field(
        "forward", description="forward: KL(teacher, student); reverse: KL(student, teacher)."
    )
    distillation_run_teacher: Literal["before", "never"] = Field(
        "before", description="before: run it over what is not cached, before training; never: all must be cached."
    )

    @field_validator("distillation_run_teacher", mode="before")
    @classmethod
    def _refuse_beside(cls, value: object) -> object:
        if value in ("beside", "live", "online"):
            raise ValueError(
                f"{value}: a teacher in the program that trains is not built: a run plans the memory of one model. Use "
                "before, which caches what the teacher says"
            )
        return value


def columns(options: DistillationOptions) -> Sequence[Column]:
    k = options.distillation_top_k
    return Column("teacher_ids", shape=(k,), dtype="int32"), Column("teacher_log_probs", shape=(k + 1,))


def build(context: LossContext[DistillationOptions]) -> Loss:
    b, head, batch, o = context.builder, context.head, context.batch, context.options
    vocabulary = head.weight.shape[0]
    if o.distillation_top_k > vocabulary:
        raise ConfigError(
            f"distillation_top_k: {o.distillation_top_k} is more than the vocabulary of the model, {vocabulary:,} "
            "tokens. Use that or less."
        )
    loss, cross_entropy, divergence = b.emit(
        "lm_head_distill",
        head.x,
        head.weight,
        batch.targets,
        *(batch.columns[column.name] for column in columns(o)),
        batch.loss_scale,
        chunks=batch.lmhead_chunks,
        weight=o.distillation_weight,
        temperature=o.distillation_temperature,
        reverse=o.distillation_kl == "reverse",
        **head.attrs,
    )
    return Loss([Figure("loss", loss)], [Figure("cross_entropy", cross_entropy), Figure("divergence", divergence)])


def prepare(context: PrepareContext[DistillationOptions]) -> Prepared:
    from .teacher import prepared_by  # with numpy, which a plan does not need

    return prepared_by(context)


DISTILLATION: LossDef[DistillationOptions] = LossDef(
    name="distillation",
    summary="cross-entropy and KL divergence from the cached top-k probabilities of a teacher",
    options=DistillationOptions,
    build=build,
    columns=columns,
    prepare=prepare,
)
