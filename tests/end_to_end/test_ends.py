"""What ended a run is recorded, reported and told to trackers, and a resumed run goes on without a trace of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from end_to_end.product import invoke, records
from end_to_end.several import several

from surogate import run
from surogate.pages.records import read_run
from surogate.pages.reports import run_lines
from surogate_core.api import EndReport, StepReport
from surogate_core.errors import ConfigError, RunStopped

if TYPE_CHECKING:
    from end_to_end.product import Workplace


def lines_of(folder: Path) -> str:
    return "\n".join(run_lines(read_run(folder), "run"))


def failing(raised: Callable[[], BaseException], step: int) -> Callable[[Any], bool]:
    """Return a listener that raises after a step."""

    def listen(report: Any) -> bool:
        if isinstance(report, StepReport) and report.step == step:
            raise raised()
        return False

    return listen


@pytest.mark.parametrize(
    ("raised", "message"),
    [
        (lambda: MemoryError("tried to allocate 3 GiB,\n of which none is left"),
         "MemoryError: tried to allocate 3 GiB, of which none is left"),
        (lambda: ValueError("<b>row</b> \x1b[2J of https://me:hunter2@host/data"),
         "ValueError: <b>row</b> \x1b[2J of https://***@host/data"),
    ],
    ids=["memory", "text of a row"],
)  # fmt: skip
def test_an_error_is_the_last_record_of_a_run_and_stands_in_its_report(
    here: Workplace, raised: Callable[[], BaseException], message: str
) -> None:
    with pytest.raises((MemoryError, ValueError)):
        run.train(run.load(here.write(max_steps=5)), lambda line: None, listen=failing(raised, 3))
    (end,) = records(here.out, "end")
    assert (end["step"], end["status"], end["message"]) == (3, "failed", message)
    assert f"! The run ended after step 3 of 5: {message}" in lines_of(here.out)
    shown = invoke("report", here.out, "--html", "page.html")
    assert shown.returncode == 0 and "\x1b" not in shown.stdout and message.split()[0] in shown.stdout
    page = Path("page.html").read_text()
    assert "<b>row" not in page and message.split(": ")[0] in page


def test_a_resumed_run_has_the_bits_and_the_steps_of_one_that_never_failed(here: Workplace) -> None:
    config = here.write(max_steps=6, save_steps=2)
    run.train(run.load(config, ["output_dir=straight"]), lambda line: None)
    with pytest.raises(OSError):
        run.train(run.load(config), lambda line: None, listen=failing(lambda: OSError("gone"), 5))
    run.train(run.load(config, ["resume_from_checkpoint=true"]), lambda line: None)
    straight = here.root / "straight"
    assert (straight / "model.safetensors").read_bytes() == (here.out / "model.safetensors").read_bytes()
    for kind in ("step", "eval"):
        one, other = ([(r["step"], r["loss"]) for r in records(out, kind)] for out in (straight, here.out))
        assert one == other and one
    assert not records(straight, "end") and [r["step"] for r in records(here.out, "end")] == [5]
    found = read_run(here.out)
    assert found.state == "finished" and not found.end
    told = lines_of(here.out)
    assert "- Resumed after step 4." in told and "- It had ended before: OSError: gone" in told
    assert "! The run ended" not in told


def test_too_many_steps_of_nan_say_so(here: Workplace) -> None:
    config = here.write(learning_rate=1e30, lr_scheduler_type="constant", max_steps=60, max_nonfinite_steps=1)
    with pytest.raises(RunStopped) as stopped:
        run.train(run.load(config), lambda line: None)
    (end,) = records(here.out, "end")
    assert end["message"] == " ".join(str(stopped.value).split()) and "not finite in 2 steps" in lines_of(here.out)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_named_and_no_error(here: Workplace, number: signal.Signals) -> None:
    told = list[EndReport]()

    def listen(report: Any) -> bool:
        if isinstance(report, StepReport) and report.step == 2:
            os.kill(os.getpid(), number)
        if isinstance(report, EndReport):
            told.append(report)
        return False

    result = run.train(run.load(here.write(max_steps=50)), lambda line: None, listen=listen)
    assert result.signal_exit == 128 + number
    (end,) = records(here.out, "end")
    assert (end["status"], end["message"], end["step"]) == ("interrupted", number.name, result.steps)
    assert [report.message for report in told] == [number.name]
    assert f"! The run ended after step {result.steps} of 50, by {number.name}." in lines_of(here.out)


def test_a_lost_rank_is_recorded_by_the_process_that_writes(workplace: Workplace) -> None:
    with several(workplace) as started:
        started.wait_for(r"(?m)^\s*step +3/")
        started.send(1, signal.SIGKILL)
        assert started.statuses() == [3, -9], started.texts()
        (error,) = started.errors()
    (end,) = records(workplace.out, "end")
    assert f"error: {end['message']}" == error and "is gone" in end["message"]


@pytest.mark.parametrize("fault", ["report_to", "alerts"])
def test_a_logger_without_an_address_is_told_before_data_is_read(
    here: Workplace, monkeypatch: pytest.MonkeyPatch, fault: str
) -> None:
    pytest.importorskip("mlflow", reason="MLflow is not installed")
    for name in [name for name in os.environ if name.startswith(("MLFLOW_", "SUROGATE_ALERT"))]:
        monkeypatch.delenv(name)
    keys: dict[str, Any] = {"report_to": "mlflow"} if fault == "report_to" else {"alerts": {"events": ["nan"]}}
    printed = list[str]()
    with pytest.raises(ConfigError, match="no address"):
        run.train(run.load(here.write(**keys)), printed.append)
    assert not printed and not here.out.exists()
