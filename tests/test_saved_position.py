"""The position in a checkpoint's manifest: what is not a count or a time is refused, with the field."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surogate.checkpoints.manifest import Manifest
from surogate.checkpoints.resume import Resumed
from surogate.checkpoints.saved_run import _progress
from surogate_core.errors import ConfigError

POSITION = {"tokens": 8, "seconds": 0.5, "nonfinite": 0, "loss": 2.0, "lr": 1e-3, "evaluations": []}


def resumed(**changes: Any) -> Resumed:
    manifest = Manifest(step=1, position=POSITION | changes, facts={}, config={}, versions={}, files=[])
    return Resumed(directory=Path("step_00000001"), manifest=manifest)


def test_a_whole_position_is_read() -> None:
    assert _progress(resumed()).tokens == 8


@pytest.mark.parametrize(
    ("field", "value"),
    [("tokens", -1), ("seconds", -1.8e19), ("seconds", float("nan")), ("nonfinite", -1), ("lr", -1.0), ("loss", "x")],
)
def test_an_impossible_value_is_refused_with_the_name_of_the_field(field: str, value: object) -> None:
    with pytest.raises(ConfigError, match=rf"position\.{field}: .* The checkpoint is damaged: resume from another one"):
        _progress(resumed(**{field: value}))


def test_a_position_that_lacks_a_field_is_refused() -> None:
    whole = resumed()
    for field in POSITION.keys() - {"lr"}:
        held = {name: value for name, value in POSITION.items() if name != field}
        with pytest.raises(ConfigError, match=f"position lacks {field}. The checkpoint is damaged"):
            _progress(replace(whole, manifest=replace(whole.manifest, position=held)))
