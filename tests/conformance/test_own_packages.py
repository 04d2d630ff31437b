"""The packages of this project pass the suite that `surogate plugins test` runs."""

from __future__ import annotations

import importlib.metadata

import pytest

from surogate_conformance import conformance
from surogate_core.plugins.discovery import load_registry

PACKAGES = sorted({entry.dist.name for entry in importlib.metadata.entry_points(group="surogate") if entry.dist})

QUICK = {
    *("surogate-recipe-bf16", "surogate-optim-adamw", "surogate-lora", "surogate-qlora-fp8", "surogate-models-phi"),
    *("surogate-offload-residual", "surogate-loss-tokens", "surogate-loss-distillation", "surogate-launch-env"),
    *("surogate-launch-ray", "surogate-log-tensorboard", "surogate-log-wandb", "surogate-log-mlflow"),
}
"""Packages with every kind of definition, of each the lightest. The others take minutes together."""


def test_the_quick_packages_have_every_kind_of_definition() -> None:
    """The checks of a lowering are those of its recipe."""
    kinds = {item.kind for item in load_registry().provided}
    assert {item.kind for item in load_registry().provided if item.plugin.distribution in QUICK} == kinds - {"lowering"}


@pytest.mark.parametrize(
    "package",
    [
        pytest.param(name, marks=() if name in QUICK else pytest.mark.slow)
        for name in PACKAGES
        if name.startswith("surogate-")
    ],
)
def test_a_package_passes(package: str) -> None:
    results = list(conformance(package))
    assert [str(result) for result in results if result.state == "failed"] == []
    assert [warning for result in results for warning in result.warnings] == []
    assert sum(result.state == "passed" for result in results) > 6
