"""A run that reports to TensorBoard and Weights & Biases and is resumed from an earlier checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest
from end_to_end.product import losses

from surogate import run
from surogate_core.errors import PluginError, SurogateError

if TYPE_CHECKING:
    from end_to_end.product import Workplace


@pytest.mark.slow
def test_a_resumed_run_continues_the_same_curve_and_the_same_wandb_run(
    here: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    reader = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="TensorBoard is not installed"
    )
    wandb = pytest.importorskip("wandb", reason="Weights & Biases is not installed")
    wandb.teardown()  # wandb reads the environment once per process, perhaps for an earlier test
    for name, value in {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "HOME": str(here.root)}.items():
        monkeypatch.setenv(name, value)
    printed: list[str] = []
    config = here.write(max_steps=4, save_steps=2, report_to=["tensorboard", "wandb"], wandb_project="p")
    run.train(run.load(config), printed.append)
    first = (here.out / "wandb/run_id").read_text()
    run.train(run.load(config, ["resume_from_checkpoint=2", "wandb_project=q"]), printed.append)

    events = reader.EventAccumulator(str(here.out / "tensorboard"))
    events.Reload()
    curve = [(event.step, event.value) for event in events.Scalars("train/loss")]
    assert [step for step, _ in curve] == [1, 2, 3, 4]
    assert [loss for _, loss in curve] == pytest.approx(losses(here.out), rel=1e-6)  # events are fp32
    assert [event.step for event in events.Scalars("eval/loss")] == [4]
    assert (here.out / "wandb/run_id").read_text() == first
    assert not any("not the bits" in line for line in printed), "report_to does not change results"


def test_a_tracker_that_is_not_installed_is_an_error_that_lists_those_that_are(here: Workplace) -> None:
    with pytest.raises(SurogateError) as caught:
        run.load(here.write(report_to="comet"))
    assert isinstance(
        caught.value, PluginError
    ) and "comet — no installed plugin provides it. Installed: console" in str(caught.value)
