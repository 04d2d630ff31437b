"""The packages of this project pass the suite that `surogate plugins test` runs."""

from __future__ import annotations

import importlib.metadata

import pytest

from surogate_conformance import conformance

PACKAGES = sorted({entry.dist.name for entry in importlib.metadata.entry_points(group="surogate") if entry.dist})


@pytest.mark.parametrize("package", [name for name in PACKAGES if name.startswith("surogate-")])
def test_a_package_passes(package: str) -> None:
    results = list(conformance(package))
    assert [str(result) for result in results if result.state == "failed"] == []
    assert [warning for result in results for warning in result.warnings] == []
    assert sum(result.state == "passed" for result in results) > 6
