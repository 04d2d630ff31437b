"""Chooses the dtypes of a run, and what serves those of its products."""

from __future__ import annotations

from pydantic import BaseModel

from ..api import DeviceInfo, LoweringDef, Precision, PrecisionRequest, RecipeDef
from ..errors import ConfigError
from ..front_end import front_end
from ..words import fold
from .registry import Registry


def choose_precision(
    registry: Registry, recipe: RecipeDef, options: BaseModel, request: PrecisionRequest, device: DeviceInfo
) -> tuple[Precision, LoweringDef | None]:
    """Return the dtypes of a run, and what serves those of its products in place of the recipe, if anything does.

    Raises ConfigError if the device cannot run them, or if nothing that is installed serves them.
    """
    precision = recipe.precision(request, options)
    lowering = _lowering(registry, recipe, precision)
    supports = [recipe.supports(device, precision, options)]
    supports += [lowering.supports(device, precision)] if lowering else []
    for support in supports:
        if not support.ok:
            raise ConfigError(f"recipe: {recipe.name} cannot run on {device.title}: {support.reason}.")
    return precision, lowering


def _lowering(registry: Registry, recipe: RecipeDef, precision: Precision) -> LoweringDef | None:
    pair = precision.matmul, precision.gradient
    if recipe.products is None or pair in recipe.products:
        return None
    name = "/".join(pair)
    if name in registry.names("lowering"):
        return registry.lowering(name)
    others = (tuple(name.split("/")) for name in registry.names("lowering"))
    served = ", ".join(f"({matmul}, {gradient})" for matmul, gradient in (*recipe.products, *others))
    hint = front_end().package("lowering", fold(name))
    raise ConfigError(
        f"matmul_dtype: {pair[0]} with gradient_dtype: {pair[1]} is served neither by recipe {recipe.name} nor by an "
        f"installed package. Supported pairs (matmul_dtype, gradient_dtype): {served}."
        + (f" Try: pip install {hint}" if hint else "")
    )
