"""The key `lr_scheduler_type` and the settings of each kind, `lr_scheduler_kwargs`: names and defaults of transformers.

`training.schedule` computes the rates. Imports no torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from .errors import Problem, validate

Kind = Literal[
    "linear",
    "cosine",
    "wsd",
    "constant",
    "constant_with_warmup",
    "cosine_with_restarts",
    "cosine_with_min_lr",
    "cosine_warmup_with_min_lr",
    "polynomial",
    "inverse_sqrt",
    "warmup_stable_decay",
    "reduce_lr_on_plateau",
]
Shape = Literal["linear", "cosine", "1-sqrt"]


class Settings(BaseModel):
    """Settings of a kind that has none."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class Cosine(Settings):
    num_cycles: float = Field(0.5, gt=0, le=1e6)


class CosineWithRestarts(Settings):
    num_cycles: int = Field(1, ge=1, le=10**6)


class CosineWithMinLr(Settings):
    num_cycles: float = Field(0.5, gt=0, le=1e6)
    min_lr: float | None = Field(None, ge=0, le=1e38)
    min_lr_rate: float | None = Field(None, ge=0, le=1)

    @model_validator(mode="after")
    def _one_minimum(self) -> CosineWithMinLr:
        if (self.min_lr is None) == (self.min_lr_rate is None):
            raise ValueError("needs min_lr or min_lr_rate, and not both")
        return self


class CosineWarmupWithMinLr(CosineWithMinLr):
    warmup_lr_rate: float | None = Field(None, ge=0, le=1)


class Polynomial(Settings):
    lr_end: float = Field(1e-7, ge=0, le=1e38)
    power: float = Field(1.0, gt=0, le=1e6)


class InverseSqrt(Settings):
    timescale: int | None = Field(None, ge=1, le=2**31)


class WarmupStableDecay(Settings):
    num_decay_steps: int = Field(ge=1, le=2**31)
    num_stable_steps: int | None = Field(None, ge=0, le=2**31)
    warmup_type: Shape = "linear"
    decay_type: Shape = "cosine"
    min_lr_ratio: float = Field(0.0, ge=0, le=1)
    num_cycles: float = Field(0.5, gt=0, le=1e6)


class ReduceLrOnPlateau(Settings):
    mode: Literal["min"] = "min"
    factor: float = Field(0.1, gt=0, lt=1)
    patience: int = Field(10, ge=0, le=2**31)
    threshold: float = Field(1e-4, ge=0, le=1e38)
    threshold_mode: Literal["rel", "abs"] = "rel"
    cooldown: int = Field(0, ge=0, le=2**31)
    min_lr: float = Field(0.0, ge=0, le=1e38)
    eps: float = Field(1e-8, ge=0, le=1e38)


SETTINGS: Final[Mapping[str, type[Settings]]] = {
    "cosine": Cosine,
    "cosine_with_restarts": CosineWithRestarts,
    "cosine_with_min_lr": CosineWithMinLr,
    "cosine_warmup_with_min_lr": CosineWarmupWithMinLr,
    "polynomial": Polynomial,
    "inverse_sqrt": InverseSqrt,
    "warmup_stable_decay": WarmupStableDecay,
    "reduce_lr_on_plateau": ReduceLrOnPlateau,
}

_KEY = "lr_scheduler_kwargs"
_HAVE_AN_END = ("cosine_with_min_lr", "cosine_warmup_with_min_lr", "polynomial", "warmup_stable_decay")
"""Kinds whose settings say where the rate ends."""


def settings_of(kind: Kind, given: Mapping[str, Any]) -> tuple[Settings | None, list[Problem]]:
    """Return the settings of a kind with its defaults filled in, or None and what is wrong with `given`."""
    model = SETTINGS.get(kind)
    if model is None:
        wrong = f"lr_scheduler_type: {kind} has no settings (got {', '.join(map(str, given))}); remove {_KEY}"
        return (None, [Problem(_KEY, wrong)]) if given else (Settings(), [])
    return validate(model, given, within=f"{_KEY}.")


def schedule_problems(kind: Kind, given: Mapping[str, Any], learning_rate: float, final: float) -> list[Problem]:
    """Return what is wrong with a kind and its settings, beside a peak rate and a `final_lr_fraction`."""
    settings, problems = settings_of(kind, given)
    if settings is None:
        return problems
    if final and kind in _HAVE_AN_END:
        text = f"is {final}, but the end of lr_scheduler_type: {kind} is in {_KEY}; remove final_lr_fraction"
        return [Problem("final_lr_fraction", text)]
    for name in ("min_lr", "lr_end"):
        end = getattr(settings, name, None)
        if end is not None and end > learning_rate:
            return [Problem(f"{_KEY}.{name}", f"is {end}, above learning_rate {learning_rate}; use a smaller one")]
    return []
