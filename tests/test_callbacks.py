"""Callbacks with the run in hand: what they may do, in which order, what is refused, and that they change no bit."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from end_to_end.product import write_model
from safetensors.torch import load_file
from written_model import write_weights

import surogate
from surogate.training.callbacks import Callbacks

TEXT = [{"text": f"to be or not to be, that is question {number}"} for number in range(120)]


@pytest.fixture
def go(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., surogate.Result]:
    """A run of four steps on rows in memory."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    config = {
        "model": str(write_model(tmp_path / "model")),
        "from_scratch": True,
        "model_dtype": "fp32",
        "sequence_len": 32,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "max_steps": 4,
        "validation_split_ratio": 0.2,
        "eval_strategy": "no",
        "save_steps": 0,
        "verify_outputs": False,
        "datasets": TEXT,
    }

    def go(name: str = "out", callback: Any = (), **keys: Any) -> surogate.Result:
        run = {**config, "output_dir": str(tmp_path / name), **keys}
        return surogate.train(run, callback=callback, notice=lambda line: None)

    return go


Go = Callable[..., surogate.Result]


def test_callbacks_act_between_steps_in_their_order_and_change_no_bit(go: Go) -> None:
    done: list[Any] = []

    def saw(report: surogate.StepReport | surogate.EvalReport) -> None:
        done.append(("saw", report.step))

    @surogate.every(2)
    def looks(run: surogate.ActiveRun) -> None:
        done.append(("looks", run.step))
        assert run.total_steps == 4 and run.loss > 0 and run.tokens > 0 and run.output_dir.name == "out"
        weights = run.weights()
        assert weights["model.embed_tokens.weight"].shape == (2048, 64)
        assert run.evaluate().loss == run.evaluate().loss
        run.log(accuracy=np.float32(0.5), worst=float("nan"))
        checkpoint = run.save()
        assert checkpoint.name == f"step_{run.step:08d}" and (checkpoint / "manifest.json").exists()

    class Last:
        def due(self, step: int) -> bool:
            return step == 2

        def __call__(self, run: surogate.ActiveRun) -> None:
            done.append(("last", run.step))

    result = go(callback=[looks, saw, Last()])
    assert done == [("saw", 1), ("saw", 2), ("looks", 2), ("last", 2), ("saw", 3), ("saw", 4), ("looks", 4), ("saw", 4)]
    logged = [record for record in result.metrics if record["log"] == "callback"]
    assert [(record["step"], record["metrics"]) for record in logged] == [
        (2, {"accuracy": 0.5, "worst": None}),
        (4, {"accuracy": 0.5, "worst": None}),
    ]
    alone = go("alone")
    assert result.losses == alone.losses and result.evaluations == alone.evaluations
    outputs = [(found.output_dir / "model.safetensors").read_bytes() for found in (result, alone)]
    assert outputs[0] == outputs[1]


def test_a_callback_reads_whole_weights_of_ranks_that_share_them(go: Go) -> None:
    kept: dict[str, Any] = {}

    @surogate.every(4)
    def reads(run: surogate.ActiveRun) -> None:
        kept.update(run.weights())

    result = go(callback=reads, ranks_per_gpu=2, zero_level=3)
    written = load_file(result.output_dir / "model.safetensors")
    assert kept.keys() == written.keys() and all(kept[name].equal(written[name]) for name in written)


def test_a_callback_stops_a_run_as_finished_and_says_why(go: Go) -> None:
    called: list[str] = []

    @surogate.every(1)
    def enough(run: surogate.ActiveRun) -> None:
        if run.step == 2:
            run.stop("the loss is low")

    @surogate.every(2)
    def behind(run: surogate.ActiveRun) -> bool:
        called.append("behind")
        return True

    result = go(callback=[enough, behind])
    assert (result.steps, result.stopped, result.signal_exit) == (2, True, 0) and called == ["behind"]
    assert result.stop_reason == "callback enough: the loss is low"
    assert (result.output_dir / "model.safetensors").exists() and result.commands
    (report,) = surogate.report(result.output_dir)
    assert (report.state, report.steps, report.total_steps) == ("finished", 2, 4)
    assert any("enough: the loss is low" in finding.text for finding in report.findings)
    assert (result.checkpoint_dir / "step_00000002").is_dir() and len(result.evaluations) == 1
    assert go("all", callback=surogate.every(4)(lambda run: True)).stop_reason == ""
    seen = go("seen", callback=lambda report: report.step == 1)
    assert seen.stop_reason == "callback <lambda>: stopped the run" and seen.stopped


def raises(run: Any) -> None:
    raise ZeroDivisionError("no rate")


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (raises, "raised ZeroDivisionError: no rate"),
        (lambda run: 3, r"returned '3'\. Return True to finish the run, False or nothing"),
        (lambda run: run.log(), r"log: takes figures by name, such as log\(accuracy=0\.5\)"),
        (lambda run: run.log(rate="fast"), "log: rate: is str, not one number. Give a float"),
        (lambda run: run.log(rate=np.arange(2)), "log: rate: is ndarray, not one number"),
        (lambda run: run.generate("to be"), "generate: takes a list of texts that are not empty"),
    ],
    ids=["raises", "returns", "empty", "text", "array", "prompt"],
)
def test_an_error_names_the_callback_and_the_run_is_saved(go: Go, act: Callable[[Any], Any], message: str) -> None:
    @surogate.every(2)
    def probe(run: surogate.ActiveRun) -> Any:
        return act(run)

    expected = rf"^callback probe, after step 2: {message}.*\. The run is saved: mend the callback, and resume it \("
    with pytest.raises(surogate.CallbackError, match=expected) as error:
        go(callback=probe)
    assert "\n" not in str(error.value) and isinstance(error.value, surogate.RunStopped)
    assert act is not raises or go(resume_from_checkpoint=True).steps == 4


def test_a_function_of_reports_that_raises_is_named_and_the_run_is_saved(go: Go) -> None:
    with pytest.raises(
        surogate.CallbackError, match=r"^callback raises, after step 1: raised ZeroDivisionError"
    ) as error:
        go(callback=raises)
    assert isinstance(error.value.__cause__, ZeroDivisionError)
    assert go(resume_from_checkpoint=True).steps == 4


def test_what_stops_the_run_itself_is_told_as_it_is(go: Go) -> None:
    @surogate.every(2)
    def full(run: surogate.ActiveRun) -> None:
        raise surogate.RunStopped("the disk is full")

    with pytest.raises(surogate.RunStopped, match=r"^the disk is full$") as error:
        go(callback=full)
    assert not isinstance(error.value, surogate.CallbackError)
    assert go(resume_from_checkpoint=2).steps == 4


def test_what_cannot_be_evaluated_called_or_kept_is_refused(go: Go) -> None:
    kept: list[surogate.ActiveRun] = []

    @surogate.every(1)
    def keeps(run: surogate.ActiveRun) -> None:
        kept.append(run)
        if run.step == 2:
            run.evaluate()

    with pytest.raises(surogate.CallbackError, match=r"keeps, after step 2: evaluate: no row is held out\. Set valid"):
        go(callback=keeps, validation_split_ratio=0)
    with pytest.raises(
        surogate.ConfigError, match="callback keeps: has returned, and with it the run is out of its hand"
    ):
        kept[0].save()
    for wrong in (3, surogate.Callback):
        with pytest.raises(surogate.ConfigError, match=r"callback \w+: is \w+, which cannot be called"):
            go("never", callback=wrong)
    for steps in (0, 1.5):
        with pytest.raises(surogate.ConfigError, match=r"every: .* is no number of steps\. Use 1 or more"):
            surogate.every(steps)  # type: ignore[arg-type]


def test_a_run_of_several_processes_is_in_no_hand() -> None:
    def sees(report: object) -> None:
        """See it."""

    with pytest.raises(
        surogate.ConfigError, match="callback sees: has the run in hand, and 2 processes train this run"
    ):
        Callbacks([surogate.every(1)(sees)]).refuse_several(2)
    Callbacks([sees]).refuse_several(2)


def test_a_signal_while_a_callback_has_the_run_saves_and_ends_it(go: Go) -> None:
    @surogate.every(2)
    def slow(run: surogate.ActiveRun) -> None:
        signal.raise_signal(signal.SIGTERM)
        run.evaluate()
        raise AssertionError("is not reached")

    result = go(callback=slow)
    assert (result.signal_exit, result.steps, result.stop_reason) == (143, 2, "")
    assert (result.checkpoint_dir / "step_00000002").is_dir() and not result.commands


def test_a_callback_cannot_generate_where_samples_are_refused(go: Go, tmp_path: Path) -> None:
    @surogate.every(1)
    def writes(run: surogate.ActiveRun) -> None:
        run.generate(["to be"])

    pairs = [{"prompt": f"to be {n}", "chosen": "or not", "rejected": "question"} for n in range(8)]
    base = str(write_weights(tmp_path / "base"))
    reward = {"loss": "reward", "datasets": pairs, "model": base, "from_scratch": False, "sequence_len": 64}
    why = "generate: loss: reward trains a head that writes no text"
    with pytest.raises(surogate.CallbackError, match=f"after step 1: {why}"):
        go(callback=writes, **reward)


@pytest.mark.slow
def test_a_callback_generates_with_the_weights_as_they_are(go: Go) -> None:
    texts: list[str] = []

    @surogate.every(2)
    def writes(run: surogate.ActiveRun) -> None:
        first, second = run.generate(["to be", "question"])
        texts.extend([first.text, second.text])
        assert first.finish in ("stop", "length") and first.step == run.step

    keys = {"sample_max_new_tokens": 4, "callback": writes, "learning_rate": 0.05}
    own = go(**keys)
    assert len(texts) == 4 and texts[:2] != texts[2:]
    shared = go("shared", **keys, sample_prompts=["to"], sample_every=0)
    assert texts[4:] == texts[:4]  # from the process of the run's samples
    assert json.dumps(own.losses) == json.dumps(shared.losses) == json.dumps(go("alone", learning_rate=0.05).losses)
    with pytest.raises(surogate.CallbackError, match=r"prompt 1: has .* tokens, and with sample_max_new_tokens: 40"):
        go("long", **(keys | {"sample_max_new_tokens": 40}))
