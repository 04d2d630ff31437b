"""The definitions of a training, as a program hands them over, and the plan that follows from them. No torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from pydantic import BaseModel, ValidationError

from .api import (
    Definition,
    Deterministic,
    DeviceInfo,
    LossDef,
    ModelDef,
    OptimizerDef,
    PrecisionRequest,
    RecipeDef,
    Target,
)
from .assembly.configured import configured
from .assembly.inputs import PlanInputs
from .assembly.resolve import refuse_missing_kernels
from .batch import StepBatch
from .errors import ConfigError
from .machine.devices import GIB
from .planning.plan import Plan, recomputed, sketched
from .plugins.discovery import load_registry
from .plugins.given import with_given
from .plugins.precision import choose_precision
from .plugins.registry import Registry


@dataclass(frozen=True, kw_only=True)
class Definitions:
    """A model, a recipe, an optimizer and a loss: each a definition, or its name among those of installed packages.

    model          the model's config.json, parsed: its architecture names the definition, the rest the sizes
    options        {"model", "recipe", "optimizer" or "loss": its options, {name: value}}
    given          further definitions: a model, ops and kernels that no installed package has
    precision      the dtypes that are not left to the recipe
    deterministic  whether every step must have the same bits at every run: "true", "false", or "auto" where it is cheap
    allow_reference  whether ops without a kernel may run their torch references on a GPU, which is slow
    """

    model: Mapping[str, Any]
    recipe: str | RecipeDef
    optimizer: str | OptimizerDef
    loss: str | LossDef = "next_token"
    options: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    given: Sequence[Definition] = ()
    precision: PrecisionRequest = field(default_factory=PrecisionRequest)
    weight_decay: float = 0.0
    max_grad_norm: float = 0.0
    deterministic: Deterministic = "auto"
    allow_reference: bool = False

    def _registry(self) -> Registry:
        """Return the definitions of installed packages and those that are given."""
        own = [one for one in (self.recipe, self.optimizer, self.loss) if not isinstance(one, str)]
        return with_given(load_registry(), [*self.given, *own])

    def plan(self, batch: StepBatch, row_length: int, device: DeviceInfo) -> Plan:
        """Plan steps of the shape of `batch`, whose rows have `row_length` tokens, for a device.

        Raises ConfigError if definitions and device do not fit together, if an op has no kernel on a GPU, or if the
        device has too little memory with everything recomputed.
        """
        planned = recomputed(sketched(replace(self._inputs(batch, row_length, device), tiles_stand_in=True)))
        planned.verify()
        if not self.allow_reference:
            refuse_missing_kernels(planned.kernels, device)
        _refuse_unless_it_fits(planned)
        return planned

    def _inputs(self, batch: StepBatch, row_length: int, device: DeviceInfo) -> PlanInputs:
        registry, first = self._registry(), batch.micro[0]
        model: ModelDef[Any] = registry.model_for(self.model)
        recipe = registry.recipe(_name(self.recipe))
        optimizer, loss = registry.optimizer(_name(self.optimizer)), registry.loss(_name(self.loss))
        if unknown := sorted(self.options.keys() - {"model", "recipe", "optimizer", "loss"}):
            raise ConfigError(
                f"options: {', '.join(unknown)} has none. Give those of model, recipe, optimizer or loss."
            )
        model = configured(model, self._options("model", model.options))
        recipe_options = self._options("recipe", recipe.options)
        precision, lowering = choose_precision(registry, recipe, recipe_options, self.precision, device)
        target = Target(device, self.deterministic)
        dims = model.dims(self.model)
        if row_length > dims.max_positions:
            raise ConfigError(f"rows of {row_length} tokens are longer than the model allows ({dims.max_positions}).")
        return PlanInputs(
            ops=registry.ops,
            model=model,
            dims=dims,
            recipe=recipe,
            recipe_options=recipe_options,
            optimizer=optimizer,
            optimizer_options=self._options("optimizer", optimizer.options),
            precision=precision,
            lowering=lowering,
            loss=loss,
            loss_options=self._options("loss", loss.options),
            batch_size=len(first.tokens) // row_length,
            seq_len=row_length,
            max_documents=len(first.cu_seqlens) - 1,
            grad_accum_steps=len(batch.micro),
            weight_decay=self.weight_decay,
            max_grad_norm=self.max_grad_norm,
            recompute_more=device.sm is not None,
            target=target,
            kernel_for=lambda op: registry.kernel_for(op, target, recipe.name),
        )

    def _options(self, kind: str, options: type[BaseModel]) -> BaseModel:
        try:
            return options.model_validate(dict(self.options.get(kind, {})))
        except ValidationError as error:
            wrong = error.errors(include_url=False)[0]
            where = ".".join(map(str, wrong["loc"]))
            known = ", ".join(options.model_fields) or "none"
            raise ConfigError(f"options of the {kind}: {where}: {wrong['msg']}. Its options: {known}.") from None


def _name(definition: str | RecipeDef | OptimizerDef | LossDef) -> str:
    return definition if isinstance(definition, str) else definition.name


def _refuse_unless_it_fits(plan: Plan) -> None:
    report = plan.report
    if not report.fits:
        raise ConfigError(
            f"a step needs {report.device_bytes['total'] / GIB:.1f} GiB with everything recomputed, more than the "
            f"{report.device.memory_bytes / GIB:.1f} of {report.device.title}. Use a smaller model, fewer rows in a "
            "micro-step or shorter ones."
        )
