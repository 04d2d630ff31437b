"""The rules of the keys that select a weight format."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel

from .findings import Findings
from .keys import ADAPTER_FLAG
from .options import Owner
from .registry import Registry
from .schema import TrainConfig


def check_weight_formats(
    config: TrainConfig | None, options: Mapping[Owner, BaseModel], registry: Registry, findings: Findings
) -> None:
    """Check that one format at most is selected, and that the weights which it stores are frozen."""
    given = {name: chosen for (kind, name), chosen in options.items() if kind == "weight format"}
    keys = [format.key for name, format in registry.weight_formats().items() if getattr(given.get(name), format.key, 0)]
    if len(keys) > 1:
        others = " and ".join(f"{key}: true" for key in keys[1:])
        findings.wrong(keys[0], f"true, but so is {others}; weights have one format, so keep one of these keys")
    if not keys and config is not None:
        for key in ("quantize_lm_head", "quantize_embedding"):
            if getattr(config, key):
                findings.wrong(key, "true, but no weight format is selected; select one, or remove the key")
    if keys and config is not None and config.adapter is None:
        findings.wrong(
            keys[0],
            f"stores frozen weights, but this run trains all of them; set {ADAPTER_FLAG.key}: true (the default of "
            "surogate sft), or remove the key",
        )
