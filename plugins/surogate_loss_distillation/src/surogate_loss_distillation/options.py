"""Keys of the loss `distillation`."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator


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
