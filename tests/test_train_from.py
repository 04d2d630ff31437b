"""Core alone trains from definitions and batches, as the program does from files."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import program_run
import pytest
import saved_batches
from end_to_end.product import MODEL_CONFIG

from surogate_core import Definitions, Trained, train_from
from surogate_core.api import NoOptions, OpDef, OptimizerDef, PrecisionRequest, StepReport
from surogate_core.batch import NO_LABEL, next_token_batch
from surogate_core.errors import ConfigError, PluginError
from surogate_core.plugins.discovery import load_registry
from surogate_core.train import Progress

if TYPE_CHECKING:
    from surogate_core.runtime.team import AnyWorker

DEFINITIONS = Definitions(
    model=MODEL_CONFIG, recipe="bf16", optimizer="adamw", precision=PrecisionRequest(model_dtype="fp32")
)


def op(reference: str) -> OpDef:
    """Return an op of this program."""
    return OpDef(kind="mine", infer=lambda ins, attrs: [], reference=reference, flops=lambda op: 0)


def tokens(steps: int, *shape: int, below: int = 2048) -> Iterator[np.ndarray]:
    draw = np.random.default_rng(0)
    return (draw.integers(0, below, shape) for _ in range(steps))


def trained(**changes: Any) -> tuple[Trained, list[StepReport]]:
    reports: list[StepReport] = []
    given = {"definitions": DEFINITIONS, "batches": tokens(4, 2, 2, 16), "learning_rate": 1e-3, **changes}
    return train_from(**given, report=reports.append), reports


def test_losses_and_weights_are_those_of_a_run_of_the_program_on_the_same_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Packed rows with several documents and padding, two micro-steps, a decay and a clipped norm."""
    losses, weights = program_run.train(tmp_path, monkeypatch)
    batches = saved_batches.load(tmp_path)
    assert max(batch.micro[0].n_documents for batch in batches) > 4
    found, held = saved_batches.train(tmp_path, program_run.ROW_LENGTH, program_run.LEARNING_RATE)
    assert found == losses and len(losses) == 5
    assert held.keys() == weights.keys()
    assert all(np.array_equal(held[name], weights[name]) for name in weights)


def test_an_array_is_a_batch_of_documents_of_one_row() -> None:
    ids = np.arange(24).reshape(2, 3, 4)
    batch = next_token_batch(ids)
    assert (batch.tokens, batch.valid_tokens, len(batch.micro)) == (24, 18, 2)
    second = batch.micro[1]
    assert second.tokens.tolist() == [*range(12, 24)] and second.n_documents == 3
    assert second.targets.tolist() == [13, 14, 15, NO_LABEL, 17, 18, 19, NO_LABEL, 21, 22, 23, NO_LABEL]
    assert second.positions.tolist() == [0, 1, 2, 3] * 3 and second.cu_seqlens.tolist() == [0, 4, 8, 12]
    assert len(next_token_batch(ids[0]).micro) == 1


def test_the_same_arguments_give_the_same_bits_and_a_training_goes_on_from_its_weights() -> None:
    first, reports = trained()
    again, _ = trained()
    assert all(np.array_equal(first.weights[name], again.weights[name]) for name in first.weights)
    assert [report.step for report in reports] == [1, 2, 3, 4] and first.progress.step == 4
    other, _ = trained(seed=1)
    assert not np.array_equal(first.weights["embedding"], other.weights["embedding"])
    _, more = trained(weights=first.weights)
    assert more[0].loss < reports[0].loss - 0.01  # the same tokens once more


def test_a_rate_of_each_step_reaches_the_optimizer() -> None:
    asked: list[int] = []

    def rate(step: int) -> float:
        asked.append(step)
        return 0.0

    found, reports = trained(learning_rate=rate)
    assert asked == [1, 2, 3, 4] and {report.lr for report in reports} == {0.0}
    still, _ = trained(batches=tokens(1, 2, 2, 16), learning_rate=0.0)
    assert np.array_equal(found.weights["embedding"], still.weights["embedding"])


class Held:
    """A duty: evaluates a batch after every second step, and ends the training after four."""

    def __init__(self) -> None:
        self.losses: list[float] = []

    def due(self, progress: Progress) -> bool:
        return progress.launched % 2 == 0

    def __call__(self, worker: AnyWorker, progress: Progress) -> bool:
        assert progress.step == progress.launched
        batch = next_token_batch(np.full((2, 16), 7)).micro[0]
        self.losses.append(worker.evaluate(batch)[0] / batch.n_valid)
        return progress.step == 4


def test_a_duty_evaluates_and_ends_the_training() -> None:
    held = Held()
    found, reports = trained(batches=tokens(9, 2, 2, 16), duties=[held])
    assert found.progress.step == len(reports) == 4 and len(held.losses) == 2
    plain, _ = trained(batches=tokens(4, 2, 2, 16))
    assert np.array_equal(found.weights["embedding"], plain.weights["embedding"])  # evaluations change nothing


def test_a_definition_of_the_program_itself_trains_and_its_errors_name_it() -> None:
    adamw = load_registry().optimizer("adamw")
    own = OptimizerDef(
        name="mine", summary="AdamW by another name", **{n: getattr(adamw, n) for n in ("options", "update")}
    )
    found, _ = trained(definitions=replace(DEFINITIONS, optimizer=own))
    plain, _ = trained()
    assert np.array_equal(found.weights["embedding"], plain.weights["embedding"])

    def fails(*given: Any) -> Any:
        raise KeyError("moment")

    with pytest.raises(PluginError, match=r"mine.*this program.*moment"):
        trained(definitions=replace(DEFINITIONS, optimizer=replace(own, update=fails, options=NoOptions)))
    with pytest.raises(PluginError, match=r"optimizer 'adamw': surogate-optim-adamw .* has one of this name"):
        trained(definitions=replace(DEFINITIONS, optimizer=replace(own, name="adamw")))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"batches": []}, "batches: there is none"),
        ({"batches": [np.zeros((2, 16))]}, r"a batch is float64 \[2, 16\]. Give ids"),
        ({"batches": [np.zeros(16, int)]}, r"a batch is int64 \[16\]"),
        ({"batches": [*tokens(1, 2, 16), *tokens(1, 2, 8)]}, "batch 1: has another shape than the first"),
        ({"batches": [*tokens(1, 2, 2, 16), *tokens(1, 1, 2, 16)]}, "batch 1: has another shape than the first"),
        ({"batches": tokens(1, 2, 16, below=1 << 20)}, "batch 0: token [0-9]+ is not among the 2048 of the model"),
        ({"batches": [np.full((2, 16), -1)]}, "batch 0: token -1 is not among the 2048"),
        ({"batches": tokens(1, 2, 65)}, r"rows of 65 tokens are longer than the model allows \(64\)"),
        ({"batches": [next_token_batch(np.zeros((2, 16), int))]}, "row_length: is needed with StepBatches"),
        ({"weights": {"head": np.zeros(3)}}, "weights: head is no param of the model, which has embedding, "),
        ({"weights": {"embedding": np.zeros((3, 2))}}, r"embedding is \[3, 2\], but the model's is \[2048, 64\]"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_named(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        trained(**changes)


@pytest.mark.parametrize(
    ("changes", "error", "says"),
    [
        ({"options": {"optimizer": {"beta": 0.9}}}, ConfigError, "options of the optimizer: beta: .* Its options: "),
        ({"options": {"adamw": {}}}, ConfigError, "options: adamw has none"),
        ({"recipe": "int1"}, PluginError, "recipe: int1 — no installed plugin provides it. Installed: bf16"),
        ({"loss": "orpo"}, ConfigError, "loss: orpo reads groups. Give StepBatches"),
        ({"model": {"architectures": ["Other"]}}, ConfigError, "Other"),
        ({"given": ["bf16"]}, PluginError, "str is no definition"),
        ({"given": [op("__main__:nope")]}, PluginError, "op 'mine': .*__main__:nope': this program has no nope"),
    ],
)
def test_definitions_that_cannot_be_used_are_named(changes: dict[str, Any], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        trained(definitions=replace(DEFINITIONS, **changes))


def test_its_names_are_found_without_torch() -> None:
    code = "import surogate_core, sys; surogate_core.Definitions; assert 'torch' not in sys.modules; print(dir())"
    subprocess.run([sys.executable, "-c", code], check=True, capture_output=True)
    with pytest.raises(AttributeError, match="no attribute 'train_for'"):
        import surogate_core

        surogate_core.train_for  # noqa: B018
