"""After a resume, micro-steps read the `step` and `lr` of the last update, as in an uninterrupted run."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import tracking
from end_to_end.product import records
from safetensors.torch import load_file

from surogate import run
from surogate.training import start as training
from surogate_core.plugins.discovery import load_registry
from surogate_core.plugins.provided import Provided
from surogate_core.plugins.registry import Registry

if TYPE_CHECKING:
    from end_to_end.product import Workplace


def noting_registry() -> Registry:
    """Return the installed plugins, with a bf16 recipe that records the scalars in a state."""
    real = load_registry()
    plugin = real.source("recipe", "bf16").plugin
    provided = [
        replace(item, definition=tracking.noting(item.definition)) if item.kind == "recipe" else item
        for item in real.provided
    ]
    provided += [Provided("op", kind, definition, plugin) for kind, definition in tracking.OPS.items()]
    return Registry(real.plugins, provided, real.diagnose, real.remarks)


def noted(checkpoint: Path) -> list[float]:
    (path,) = (checkpoint / "training_state").iterdir()
    return [float(x) for x in load_file(path)[tracking.NOTED]]


@pytest.mark.parametrize("ranks", [1, 2])
def test_an_op_that_copies_the_scalars_reads_those_of_the_checkpoint(
    here: Workplace, monkeypatch: pytest.MonkeyPatch, ranks: int
) -> None:
    registry = noting_registry()
    monkeypatch.setattr(training, "load_registry", lambda **_: registry)
    config = here.write(max_steps=3, save_steps=1, eval_steps=0, ranks_per_gpu=ranks)
    run.train(run.load(config, ["output_dir=straight"]), notice=lambda line: None)
    resume = ["output_dir=resumed", "resume_from_checkpoint=straight/step_00000002"]
    run.train(run.load(config, resume), notice=lambda line: None)
    lr = next(record["lr"] for record in records(here.root / "straight", "step") if record["step"] == 2)
    assert lr > 0
    for name in ("straight", "resumed"):
        assert noted(here.root / name / "step_00000003") == [2, pytest.approx(lr, rel=1e-6)], name
