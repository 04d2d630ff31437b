"""The keys of the config."""

from __future__ import annotations

from math import sqrt
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

ALL_LINEAR = ("all-linear", "all")
"""What `lora_target_modules` may hold for every linear projection of the blocks."""


def _names(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class LoraOptions(BaseModel):
    """The keys of LoRA, those of the YAML file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lora_rank: int = Field(16, ge=1, le=65536, description="Rank r of the update.")
    lora_alpha: float = Field(32.0, gt=0, le=1e6, description="The update is scaled by alpha / r.")
    lora_use_rslora: bool = Field(False, description="Scale by alpha / sqrt(r) instead (Kalajdzievski 2023).")
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="Share of its input that each adapter does not see.")
    lora_target_modules: Annotated[tuple[str, ...], BeforeValidator(_names)] = Field(
        ("all-linear",),
        description="Projections that get an adapter, by the end of their name (q_proj, layers.0.mlp.up_proj); "
        "all-linear: every one in the blocks.",
    )

    @field_validator("lora_target_modules")
    @classmethod
    def _some_targets(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in value))
        if not names or not all(names):
            raise ValueError("must name projections, or all-linear")
        return names

    @property
    def scale(self) -> float:
        """What B A x is multiplied by."""
        return scale(self.lora_alpha, self.lora_rank, self.lora_use_rslora)


def scale(alpha: float, rank: int, rslora: bool) -> float:
    """alpha / r, or alpha / sqrt(r)."""
    return alpha / (sqrt(rank) if rslora else rank)
