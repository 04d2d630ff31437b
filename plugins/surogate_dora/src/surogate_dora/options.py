"""The keys of the config."""

from __future__ import annotations

from collections.abc import Mapping
from math import sqrt
from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, field_validator

ALL_LINEAR = "all-linear"


def _names(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


class DoraOptions(BaseModel):
    """The keys of DoRA, those of the YAML file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dora_rank: int = Field(16, ge=1, le=65536, description="Rank r of the update.")
    dora_alpha: float = Field(32.0, gt=0, le=1e6, description="The update is scaled by alpha / r.")
    dora_use_rslora: bool = Field(False, description="Scale by alpha / sqrt(r) instead (Kalajdzievski 2023).")
    dora_target_modules: Annotated[tuple[str, ...], BeforeValidator(_names)] = Field(
        (ALL_LINEAR,),
        description="Projections that get an adapter, by the end of their name (q_proj, layers.0.mlp.up_proj); "
        "all-linear: every one in the blocks.",
    )

    @field_validator("dora_target_modules")
    @classmethod
    def _some_targets(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in value))
        if not names or not all(names):
            raise ValueError("must name projections, or all-linear")
        return names

    @property
    def scale(self) -> float:
        """Return the factor of B A."""
        return scale(self.dora_rank, self.dora_alpha, self.dora_use_rslora)


def scale(rank: int, alpha: float, rslora: bool) -> float:
    """alpha / r, or alpha / sqrt(r)."""
    return alpha / (sqrt(rank) if rslora else rank)


def scale_of(config: Mapping[str, Any]) -> float:
    """Return the factor of B A that an `adapter_config.json` means."""
    return scale(config["r"], config["lora_alpha"], bool(config.get("use_rslora")))
