"""Packages that the program requires cannot require it in their metadata; their commands compare versions."""

from __future__ import annotations

import pytest

import surogate
from surogate_core.errors import PluginError
from surogate_core.plugins import versions


@pytest.mark.parametrize("package", ["surogate-verify", "surogate-profile", "surogate-serving"])
def test_a_command_runs_in_the_program_of_its_minor_version(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    versions.refuse_other_program(package)
    monkeypatch.setattr(versions, "version", {package: "0.3.1", "surogate": "0.3.0"}.__getitem__)
    versions.refuse_other_program(package)
    monkeypatch.setattr(versions, "version", {package: "0.3.1", "surogate": "0.2.9"}.__getitem__)
    with pytest.raises(PluginError, match=rf"{package} 0\.3\.1 runs in surogate 0\.3\.1, not 0\.2\.9\. pip install -U"):
        versions.refuse_other_program(package)


def test_every_public_name_of_the_package_is_found() -> None:
    assert all(hasattr(surogate, name) for name in surogate.__all__)
    assert {name for names in surogate._HOMES.values() for name in names.split()} == {*surogate.__all__}
