"""`import surogate`: a run from Python, with keys as arguments, a callback and a result."""

from __future__ import annotations

import io
import shutil
import signal
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from end_to_end.product import write_model

import surogate
from surogate.reporting import builtin
from surogate.reporting.console import PlainLogger
from surogate.reporting.live import LiveLogger
from surogate_core.api import RunInfo

ROOT = Path(__file__).parents[1]


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A run of three steps, as a mapping."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    (tmp_path / "text.txt").write_text("to be or not to be, that is the question\n" * 400)
    return {
        "model": str(write_model(tmp_path / "model")),
        "from_scratch": True,
        "model_dtype": "fp32",
        "datasets": [{"path": str(tmp_path / "text.txt"), "type": "text", "sample_by": "line"}],
        "output_dir": str(tmp_path / "out"),
        "sequence_len": 32,
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 1,
        "max_steps": 3,
        "eval_steps": 2,
        "save_steps": 0,
        "verify_outputs": False,
    }


def quiet(line: str) -> None:
    """Drop a line."""


def test_a_run_returns_its_losses_and_folders_and_reports_each_step(config: dict[str, Any]) -> None:
    seen: list[Any] = []
    result = surogate.train(config, callback=seen.append, notice=quiet, max_steps=4, learning_rate=1e-3)
    steps = [report for report in seen if isinstance(report, surogate.StepReport)]
    assert [report.step for report in steps] == [1, 2, 3, 4]
    assert result.losses == [report.loss for report in steps] and result.loss == result.losses[-1]
    assert [(r.step, r.loss) for r in seen if isinstance(r, surogate.EvalReport)] == [e[:2] for e in result.evaluations]
    assert steps[0].lr <= 1e-3 and not result.stopped
    assert (result.output_dir / "model.safetensors").exists()


def after_the_first_step(report: object) -> bool:
    return isinstance(report, surogate.StepReport) and report.step == 1


def test_a_callback_that_returns_true_finishes_the_run_and_it_resumes(config: dict[str, Any]) -> None:
    result = surogate.train(config, callback=after_the_first_step, notice=quiet)
    assert result.stopped and 1 <= result.steps < 3 and result.signal_exit == 0
    assert (result.output_dir / "model.safetensors").exists() and (result.output_dir / "README.md").exists()
    assert [step for step, *_ in result.evaluations] == [result.steps]
    assert result.commands and (result.checkpoint_dir / f"step_{result.steps:08d}").is_dir()
    straight = surogate.train(config, notice=quiet, output_dir=f"{result.output_dir}-straight")
    rest = surogate.train(config, notice=quiet, resume_from_checkpoint=True)
    assert rest.steps == 3 and not rest.stopped and rest.losses == straight.losses
    weights = [(found.output_dir / "model.safetensors").read_bytes() for found in (rest, straight)]
    assert weights[0] == weights[1]


def test_a_callback_can_stop_a_run_by_its_evaluation_loss_and_at_its_last_step(config: dict[str, Any]) -> None:
    at_evaluation = surogate.train(
        config, callback=lambda report: isinstance(report, surogate.EvalReport), notice=quiet
    )
    assert (at_evaluation.steps, at_evaluation.stopped) == (2, True)
    assert [step for step, *_ in at_evaluation.evaluations] == [2]
    config["output_dir"] += "-last"
    at_the_end = surogate.train(config, callback=lambda report: report.step == 3, notice=quiet)
    assert (at_the_end.steps, at_the_end.stopped) == (3, False) and at_the_end.commands


def test_a_stopped_adapter_is_written_and_an_interrupted_run_names_no_outputs(
    config: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    base = surogate.train(config, callback=after_the_first_step, notice=quiet)
    tokenizer = [ROOT / "examples/tiny-qwen3" / name for name in ("tokenizer.json", "tokenizer_config.json")]
    for file in tokenizer:
        shutil.copy(file, base.output_dir)
    config |= {"model": str(base.output_dir), "from_scratch": False, "output_dir": f"{base.output_dir}-lora"}
    stopped = surogate.sft(config, callback=after_the_first_step, notice=quiet, merge_adapter=True)
    assert stopped.adapter_dir and (stopped.adapter_dir / "adapter_config.json").exists()
    assert stopped.merged_dir and (stopped.merged_dir / "model.safetensors").exists()

    def interrupt(report: object) -> None:
        signal.raise_signal(signal.SIGTERM)

    config["output_dir"] += "-interrupted"
    cut = surogate.sft(config, callback=interrupt, notice=quiet, merge_adapter=True)
    assert (cut.signal_exit, cut.stopped) == (143, True)
    assert (cut.adapter_dir, cut.merged_dir, cut.commands) == (None, None, ())


def test_a_plan_takes_a_file_a_device_and_keys() -> None:
    planned = surogate.plan(ROOT / "examples/qwen3-8b.yaml", device="h200", per_device_train_batch_size=1)
    assert len(repr(planned)) < 4000  # a cell of a notebook shows it
    assert planned.report.fits and planned.report.tokens == 4 * 4096
    assert surogate.load(ROOT / "examples/quickstart-sft.yaml", mode="sft").config.adapter == "lora"


@pytest.mark.slow
def test_a_model_is_verified_from_python_on_rows_in_memory(config: dict[str, Any]) -> None:
    rows = ({"text": f"to be or not to be {number}"} for number in range(50))
    found = surogate.verify(config, rows=1, length=32, datasets=rows, notice=quiet)
    assert found.passed and found.first_wrong is None and "from the run's data" in found.tokens
    assert all(row.error <= row.allowed for row in found.verdict.rows)
    with pytest.raises(surogate.ConfigError, match=r"verify: rows is 0 and layers is None\. Both are 1 or more"):
        surogate.verify(config, rows=0)


def test_the_data_of_a_run_is_counted_from_python(config: dict[str, Any]) -> None:
    found = surogate.tokenize(config, notice=quiet)
    (entry,) = found.datasets
    assert (entry.documents, entry.type, entry.left_out) == (400, "text", []) and not found.documents
    assert 0 < entry.trained <= entry.tokens and found.rows["train"].sequence_len == 32


def test_a_wrong_key_is_told_as_on_the_command_line(config: dict[str, Any]) -> None:
    with pytest.raises(surogate.ConfigError, match=r"config: lerning_rate: unknown key; did you mean learning_rate\?"):
        surogate.train(config, lerning_rate=1)
    rows = iter([{"text": "a"}])
    with pytest.raises(surogate.ConfigError, match="lerning_rate: unknown key"):
        surogate.train(config, lerning_rate=1, datasets=rows, notice=quiet)
    assert next(rows) == {"text": "a"}  # data is read once the config is right


def test_a_callback_is_refused_where_other_processes_train(config: dict[str, Any]) -> None:
    with pytest.raises(surogate.ConfigError, match=r"launcher: ray trains in other processes.* without a callback"):
        surogate.train(config, launcher="ray", callback=quiet, notice=quiet)  # type: ignore[arg-type]


@pytest.mark.parametrize(("modules", "logger"), [((), PlainLogger), (("ipykernel", "ipywidgets"), LiveLogger)])
def test_a_notebook_that_can_draw_has_the_progress_bar(
    modules: tuple[str, ...], logger: type, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in modules:
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(builtin, "find_spec", lambda name: name in modules or None)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    info = RunInfo(
        run_name="r", output_dir=tmp_path, total_steps=2, steps_per_epoch=2, tokens_per_step=8, config={}, versions={},
        device="cpu", parameters=1, trainable_parameters=1, done_steps=0, eval_time=0.0,
    )  # fmt: skip
    opened = builtin.open_console(info)
    opened.close("done")
    assert type(opened) is logger
