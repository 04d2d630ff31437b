"""The keys of the config."""

from __future__ import annotations

import re
from math import sqrt
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationInfo, field_validator

from .matching import check, of_pattern

ALL_LINEAR = ("all-linear", "all")
"""The value of `lora_target_modules` that stands for every linear projection of the blocks."""


def _names(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


_Rank = Annotated[int, Field(ge=1, le=65536)]
_Alpha = Annotated[float, Field(gt=0, le=1e6)]


class LoraOptions(BaseModel):
    """The keys of LoRA, those of the YAML file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    lora_rank: _Rank = Field(16, description="Rank r of the update.")
    lora_alpha: _Alpha = Field(32.0, description="The update is scaled by alpha / r.")
    lora_rank_pattern: dict[str, _Rank] = Field(
        {},
        description="Other ranks for some projections, as {pattern: rank}: a regular expression for a projection's "
        "name, or the end of it from a dot on. The first that fits counts.",
    )
    lora_alpha_pattern: dict[str, _Alpha] = Field(
        {}, description="Other alphas for some projections, as in `lora_rank_pattern`."
    )
    lora_use_rslora: bool = Field(False, description="Scale by alpha / sqrt(r) instead (Kalajdzievski 2023).")
    lora_init: Literal["kaiming", "pissa"] = Field(
        "kaiming",
        description="How A and B start. kaiming: A random, B zero. pissa: from the largest singular values of the "
        "weight, whose rest stays frozen (Meng et al. 2024).",
    )
    lora_dropout: float = Field(0.0, ge=0, lt=1, description="Share of its input that each adapter does not see.")
    loraplus_lr_ratio: float | None = Field(
        None,
        gt=0,
        le=1e6,
        description="LoRA+ (Hayou et al. 2024): learning rate of B divided by that of A, which is `learning_rate`. "
        "Vectors that are trained in full have the rate of B, as in PEFT. null: 1.",
    )
    lora_target_parameters: Annotated[tuple[str, ...], BeforeValidator(_names)] = Field(
        (),
        description="Parameters that get an adapter for each expert, by the end of their name in transformers "
        "(mlp.experts.gate_up_proj, mlp.experts.down_proj).",
    )
    lora_target_modules: Annotated[tuple[str, ...], BeforeValidator(_names)] = Field(
        ("all-linear",),
        description="Projections that get an adapter, by the end of their name (q_proj, layers.0.mlp.up_proj); "
        "all-linear: every one in the blocks; []: none, but experts (`lora_target_parameters`).",
    )
    lora_modules_to_save: Annotated[tuple[str, ...], BeforeValidator(_names)] = Field(
        (),
        description="Modules that are trained in full with the adapter and stored in it, by the end of their name: "
        "embed_tokens, lm_head, norms. vLLM loads no such adapter.",
    )

    @field_validator("lora_dropout")
    @classmethod
    def _drops_no_weight(cls, value: float, info: ValidationInfo) -> float:
        if value and info.data.get("lora_init") == "pissa":
            raise ValueError("must be 0 with lora_init: pissa, because it would drop the largest part of each weight")
        return value

    @field_validator("lora_target_parameters")
    @classmethod
    def _as_in_peft(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in value))
        if not all(names):
            raise ValueError("must name parameters: mlp.experts.gate_up_proj, mlp.experts.down_proj")
        if names and info.data.get("lora_dropout"):
            raise ValueError("needs lora_dropout: 0, because PEFT has no dropout of such adapters")
        if names and info.data.get("lora_init") == "pissa":
            raise ValueError("needs lora_init: kaiming, because PEFT has no pissa of such adapters")
        return names

    @field_validator("lora_target_modules")
    @classmethod
    def _some_targets(cls, value: tuple[str, ...], info: ValidationInfo) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in value))
        if not all(names) or not (names or info.data.get("lora_target_parameters")):
            raise ValueError("must name projections, or all-linear")
        return names

    @field_validator("lora_modules_to_save")
    @classmethod
    def _named(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        names = tuple(dict.fromkeys(name.strip() for name in value))
        if not all(names):
            raise ValueError("must name modules: embed_tokens, lm_head, norm ...")
        return names

    @field_validator("lora_rank_pattern", "lora_alpha_pattern")
    @classmethod
    def _compiling(cls, value: dict[str, Any]) -> dict[str, Any]:
        for pattern in value:
            try:
                check(pattern)
            except re.error as error:
                raise ValueError(f"{pattern!r} is no regular expression: {error}") from None
        return value

    @property
    def as_saved(self) -> LoraOptions:
        """The options of the saved adapter, with the ranks of both pairs that PiSSA has, and the same scales."""
        if self.lora_init == "kaiming":
            return self
        grown = sqrt(2) if self.lora_use_rslora else 2
        return self.model_copy(
            update={
                "lora_init": "kaiming",
                "lora_rank": 2 * self.lora_rank,
                "lora_alpha": grown * self.lora_alpha,
                "lora_rank_pattern": {name: 2 * rank for name, rank in self.lora_rank_pattern.items()},
                "lora_alpha_pattern": {name: grown * alpha for name, alpha in self.lora_alpha_pattern.items()},
            }
        )

    def rank_of(self, module: str) -> int:
        """The rank r of a projection's update."""
        return of_pattern(self.lora_rank_pattern, module, self.lora_rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of B A x of a projection."""
        alpha = of_pattern(self.lora_alpha_pattern, module, self.lora_alpha)
        return scale(alpha, self.rank_of(module), self.lora_use_rslora)


def scale(alpha: float, rank: int, rslora: bool) -> float:
    """alpha / r, or alpha / sqrt(r)."""
    return alpha / (sqrt(rank) if rslora else rank)
