"""The metrics file of a run, its console output, the loss picture and the summary."""

from __future__ import annotations

import errno
import io
import json
import math
import re
import struct
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from surogate.cli.train import print_summary
from surogate.reporting.builtin import LOGGERS, open_console
from surogate.reporting.console import PlainLogger, RunClock, eval_line, sample_lines, step_line
from surogate.reporting.metrics import JsonLinesLogger, cut_metrics, read_metrics
from surogate.reporting.picture import PictureLogger, draw_loss, read_curve, smooth, thin_out
from surogate.reporting.text import (
    count_text,
    duration_text,
    eta_text,
    loss_text,
    lr_text,
    norm_text,
    parameters_text,
    step_time_text,
)
from surogate.training.result import TrainResult
from surogate_core.api import EvalReport, Logger, RunInfo, SampleReport, StepReport
from surogate_core.errors import ConfigError, RunStopped

STEP_KEYS = {
    "log", "step", "epoch", "loss", "norm", "lr", "tokens", "valid_tokens", "tokens_per_second", "duration_ms", "time",
}  # fmt: skip
EVAL_KEYS = {"log", "step", "loss", "valid_tokens", "duration_ms", "time"}


def info(output_dir: Path, **changes: Any) -> RunInfo:
    known: dict[str, Any] = {
        "run_name": "tiny [red]$x_1",  # must not be read as Rich markup or a formula
        "output_dir": output_dir,
        "total_steps": 1200,
        "steps_per_epoch": 400,
        "tokens_per_step": 16384,
        "config": {"learning_rate": 3e-4, "logging_steps": 1},
        "versions": {"torch": "2.13.0"},
        "device": "cpu",
        "parameters": 3_450_000,
        "trainable_parameters": 3_450_000,
    }
    return RunInfo(**{**known, **changes})


def step(number: int = 100, **changes: Any) -> StepReport:
    known: dict[str, Any] = {
        "step": number,
        "epoch": number / 400,
        "loss": 2.3456,
        "norm": 0.12,
        "lr": 3e-4,
        "tokens": 16000,
        "valid_tokens": 15900,
        "tokens_per_second": 125312.0,
        "duration_ms": 156.0,
        "time": 1e9 + number,
    }
    return StepReport(**{**known, **changes})


def evaluation(number: int = 100, loss: float = 2.5, duration_ms: float = 834.0) -> EvalReport:
    return EvalReport(step=number, loss=loss, valid_tokens=110_000, duration_ms=duration_ms, time=1e9)


def record(output_dir: Path, reports: Sequence[StepReport | EvalReport], **changes: Any) -> Path:
    feed(JsonLinesLogger(info(output_dir, **changes)), reports)
    return output_dir / "metrics.jsonl"


def feed(logger: Logger, reports: Sequence[StepReport | EvalReport]) -> None:
    for report in reports:
        logger.report(report)
    logger.close("done")


def parse(path: Path) -> list[dict[str, Any]]:
    """Return every line, parsed without NaN: fails if a line is not valid JSON."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    return [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]


def test_the_builtin_loggers_are_in_every_run_and_opening_the_list_imports_neither_rich_nor_matplotlib() -> None:
    assert [(logger.name, logger.always) for logger in LOGGERS] == [
        ("jsonl", True),
        ("console", True),
        ("picture", True),
    ]
    heavy = ("rich", "matplotlib", "numpy", "torch")
    code = f"import sys, surogate.reporting.metrics; print([m for m in {heavy} if m in sys.modules])"
    assert subprocess.check_output([sys.executable, "-c", code], text=True).strip() == "[]"


# ------------------------------------------------------------------------------------------------------ metrics.jsonl


def test_records_have_exactly_the_keys_of_the_contract(tmp_path: Path) -> None:
    run, first, second = parse(record(tmp_path, [step(1), evaluation(1)]))
    assert set(run) == {
        "log", "run_name", "time", "config", "versions", "device", "parameters", "trainable_parameters",
        "total_steps", "steps_per_epoch", "tokens_per_step", "planned",
    }  # fmt: skip
    assert set(first) == STEP_KEYS and first["log"] == "step"
    assert set(second) == EVAL_KEYS and second["log"] == "eval"
    assert first["loss"] == 2.3456 and first["valid_tokens"] == 15900 and second["loss"] == 2.5


def test_skipped_appears_only_on_skipped_steps(tmp_path: Path) -> None:
    reports = [step(1), step(2, norm=math.inf, skipped=True), step(3)]
    assert [r.get("skipped") for r in parse(record(tmp_path, reports))[1:]] == [None, True, None]


@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_become_null(tmp_path: Path, number: float) -> None:
    path = record(
        tmp_path,
        [step(1, loss=number, norm=number, skipped=True), evaluation(1, number)],
        config={"a": [{"b": number}]},
    )
    run, first, second = parse(path)
    assert run["config"] == {"a": [{"b": None}]}
    assert first["loss"] is None and first["norm"] is None and first["skipped"] is True
    assert second["loss"] is None


def test_every_line_is_on_disk_before_the_next_report(tmp_path: Path) -> None:
    logger = JsonLinesLogger(info(tmp_path))
    for number in range(1, 4):
        logger.report(step(number))
        assert parse(tmp_path / "metrics.jsonl")[-1]["step"] == number
    logger.close("done")


def test_a_second_run_appends(tmp_path: Path) -> None:
    before = record(tmp_path, [step(1)]).read_bytes()
    after = record(tmp_path, [step(2)]).read_bytes()
    assert after.startswith(before)
    assert [r["log"] for r in parse(tmp_path / "metrics.jsonl")] == ["run", "step", "run", "step"]


@pytest.mark.parametrize("torn", [b'{"log": "step", "step": 2, "lo', b"\0" * 300, b"x" * 200_000])
def test_a_partial_line_of_a_crash_does_not_affect_other_lines(tmp_path: Path, torn: bytes) -> None:
    path = record(tmp_path, [step(1)])
    path.write_bytes(path.read_bytes() + torn)
    record(tmp_path, [step(2)])
    assert [(r["log"], r.get("step")) for r in parse(path)] == [("run", None), ("step", 1), ("run", None), ("step", 2)]


def test_a_complete_last_line_without_a_newline_is_kept(tmp_path: Path) -> None:
    path = record(tmp_path, [step(1)])
    path.write_bytes(path.read_bytes()[:-1])
    record(tmp_path, [step(2)])
    assert [r.get("step") for r in parse(path)] == [None, 1, None, 2]


def test_a_file_of_one_partial_line_starts_empty(tmp_path: Path) -> None:
    (tmp_path / "metrics.jsonl").write_bytes(b'{"log": "ru')
    assert [r["log"] for r in parse(record(tmp_path, [step(1)]))] == ["run", "step"]


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_stops_the_run_with_a_remedy(tmp_path: Path) -> None:
    with pytest.raises(RunStopped, match=r"/dev/full: cannot write: No space left on device\. Make room"):
        JsonLinesLogger(info(tmp_path, config={"log_file": "/dev/full"}))


def test_an_output_directory_that_cannot_be_written_is_the_users_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"output_dir: cannot write .*metrics\.jsonl: (Not a directory|File exists)"):
        JsonLinesLogger(info(tmp_path / "file"))


def test_reading_skips_lines_that_are_not_objects(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_bytes(b'{"log": "step", "step": 1}\n{"log": "st\n\xff\xfe\n12\n\n{"log": "step", "step": 2}\n')
    assert [r["step"] for r in read_metrics(path)] == [1, 2]


# ------------------------------------------------------------------------------------------------------------ console


def plain(reports: Sequence[StepReport | EvalReport], **changes: Any) -> list[str]:
    out = io.StringIO()
    feed(PlainLogger(info(Path(), **changes), out), reports)
    return out.getvalue().splitlines()


def test_a_plain_sample_has_the_characters_that_the_stream_can_encode() -> None:
    how: dict[str, Any] = {"tokens": 2, "finish": "stop", "duration_ms": 1.0, "time": 0.0}
    said: Any = SampleReport(step=2, index=0, prompt="Wie heißt 東京?", text="Köln\x1b", **how)
    shown = {"utf-8": "Wie heißt 東京?|  Köln\\x1b", "ascii": "Wie hei\\xdft \\u6771\\u4eac?|  K\\xf6ln\\x1b"}
    for encoding, wanted in shown.items():
        raw = io.BytesIO()
        out = io.TextIOWrapper(raw, encoding=encoding)
        feed(PlainLogger(info(Path()), out), [said])
        assert raw.getvalue().decode(encoding).splitlines() == f"sample at step 2: {wanted}".split("|")


def test_plain_line_of_a_step() -> None:
    assert plain([step(100)]) == ["step  100/1200  loss 2.3456  norm 0.12  lr 3.0e-4   125k tok/s  156ms  eta 2m52s"]


def test_plain_line_of_an_evaluation() -> None:
    assert plain([evaluation(100, 2.0)]) == ["eval at step 100: loss 2.0000 (perplexity 7.389), 110k tokens in 834ms"]
    assert plain([evaluation(3, 800.0)]) == ["eval at step 3: loss 800.00, 110k tokens in 834ms"]
    assert plain([evaluation(3, math.nan)]) == ["eval at step 3: loss nan, 110k tokens in 834ms"]


def test_plain_lines_are_printed_every_logging_steps_and_for_the_first_last_and_skipped_steps() -> None:
    reports = [step(n, skipped=n == 7, loss=math.nan if n == 7 else 2.0) for n in range(1, 26)]
    lines = plain(reports, total_steps=25, config={"logging_steps": 10})
    assert [int(line.split()[1].split("/")[0]) for line in lines] == [1, 7, 10, 20, 25]
    assert lines[1] == "step  7/25  loss nan     norm 0.12  skipped: not finite"


positive = st.floats(0, 1e12) | st.sampled_from([math.nan, math.inf])


@given(
    total=st.integers(1, 9_999_999),
    at=st.floats(0, 1),
    loss=st.floats(-9, 999),
    norm=positive,
    lr=st.floats(0, 10),
    rate=st.floats(0, 1e13),
    ms=st.floats(0, 1e7),
    skipped=st.booleans(),
)
def test_every_plain_line_is_ascii_without_escape_codes_and_fits_80_columns(
    total: int, at: float, loss: float, norm: float, lr: float, rate: float, ms: float, skipped: bool
) -> None:
    number = max(1, int(at * total))
    report = step(number, loss=loss, norm=norm, lr=lr, tokens_per_second=rate, duration_ms=ms, skipped=skipped)
    (line,) = plain([report], total_steps=total, config={"logging_steps": number})
    assert len(line) <= 80, line
    assert line.isascii() and line.isprintable()


def test_columns_of_plain_lines_line_up() -> None:
    small = step_line(step(3, loss=2.0, norm=0.5, tokens_per_second=900.0, duration_ms=9.0), 1200, 50)
    large = step_line(step(1100, loss=12.0, norm=123.0, tokens_per_second=1.25e6, duration_ms=12345.0), 1200, 50)
    for word in ("loss", "norm", "lr", "tok/s", "eta"):
        assert small.index(word) == large.index(word)


def test_eta_uses_the_median_step_time_so_a_slow_first_step_does_not_count() -> None:
    clock = RunClock(info(Path(), total_steps=105))
    for number, ms in enumerate((60_000, 100, 100, 110, 90)):
        clock.step(step(number + 1, duration_ms=ms))
    assert clock.seconds() == pytest.approx((0.5, 10.0))
    clock.step(step(105, duration_ms=100))
    assert clock.seconds()[1] == 0


def test_eta_counts_the_evaluations_to_come_as_planned_until_one_is_measured() -> None:
    clock = RunClock(info(Path(), total_steps=25, eval_time=4.0, evaluated=(10, 20, 25)))
    assert clock.seconds()[1] == pytest.approx(25 + 3 * 4), "without a measured step, in steps"
    clock.step(step(10, duration_ms=500))
    assert clock.seconds() == pytest.approx((5.0, 7.5 + 3 * 2))
    clock.eval(evaluation(10, duration_ms=6000))
    assert clock.seconds() == pytest.approx((5.0 + 6, 7.5 + 2 * 6))
    clock.step(step(25, duration_ms=500))
    assert clock.seconds() == pytest.approx((12.5 + 2 * 6, 6)), "the last evaluation is to come"
    clock.eval(evaluation(25, duration_ms=6000))
    assert clock.seconds()[1] == 0


def test_without_a_validation_set_no_evaluation_is_to_come() -> None:
    clock = RunClock(info(Path(), total_steps=25))
    clock.step(step(10, duration_ms=500))
    assert clock.seconds() == pytest.approx((5.0, 7.5))


def test_numbers_of_parameters_are_written_as_in_names_of_models() -> None:
    texts = {0: "0", 999: "999", 1000: "1.0K", 8192: "8.2K", 999_949: "999.9K", 999_951: "1.0M", 596_049_920: "596.0M"}
    texts |= {999_949_000: "999.9M", 999_951_000: "1.00B", 8_190_735_360: "8.19B"}
    assert {n: parameters_text(n) for n in texts} == texts


def test_number_formats() -> None:
    assert [loss_text(x) for x in (2.34567, 10.8123, 123.456, 0.0, math.nan)] == [
        "2.3457", "10.812", "123.46", "0.0000", "nan",
    ]  # fmt: skip
    assert [loss_text(x) for x in (-0.0, -2.34567, -123.456)] == ["-0.000", "-2.346", "-123.5"]
    assert [norm_text(x) for x in (0.123, 1.0, 12.34, 123.4, 1234, 0.0012, 0.0)] == [
        "0.12", "1.00", "12.3", "123", "1e3", "1e-3", "0.0",
    ]  # fmt: skip
    assert [lr_text(x) for x in (3e-4, 2.96e-4, 0.0, 1.0)] == ["3.0e-4", "3.0e-4", "0", "1.0e0"]
    assert [step_time_text(x) for x in (8.44, 156, 1234, 12_345, 123_456)] == [
        "8.4ms",
        "156ms",
        "1.23s",
        "12.3s",
        "123s",
    ]
    assert [eta_text(x) for x in (0, 59.4, 135, 42 * 60, 11_100, 43_200, 187_200, 1e6)] == [
        "0s", "59s", "2m15s", "42m", "3h05m", "12h", "2d04h", "11d",
    ]  # fmt: skip
    assert [count_text(x) for x in (0, 512, 1250, 12_500, 999_499, 999_999, 19.66e6, 1.1e9, 3e12)] == [
        "0", "512", "1.25k", "12.5k", "999k", "1.00M", "19.7M", "1.10B", "3T",
    ]  # fmt: skip
    assert [duration_text(x) for x in (4.21, 59.96, 135, 11_100)] == ["4.2 s", "1 min 00 s", "2 min 15 s", "3 h 05 min"]


class Broken(io.StringIO):
    """A stream whose reader exits after `lines` lines."""

    def __init__(self, lines: int) -> None:
        super().__init__()
        self.left = lines

    def write(self, text: str) -> int:
        if self.left <= 0:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")
        self.left -= text.count("\n")
        return super().write(text)


def test_plain_lines_stop_and_the_run_continues_when_the_reader_exits() -> None:
    out = Broken(lines=1)
    feed(PlainLogger(info(Path()), out), [step(n) for n in range(1, 5)])
    assert out.getvalue().count("\n") == 1


def test_a_closed_pipe_does_not_change_the_exit_code(tmp_path: Path) -> None:
    code = """
        import sys; sys.path.insert(0, {tests!r})
        from test_metrics import *
        logger = open_console(info(Path()))
        sys.stdin.readline()  # the reader has exited by now
        feed(logger, [step(n) for n in range(1, 50)])
        print("more from elsewhere")
    """
    code = "\n".join(line.strip() for line in code.format(tests=str(Path(__file__).parent)).splitlines())
    process = subprocess.Popen([sys.executable, "-c", code], stdin=-1, stdout=-1, stderr=-1, text=True)
    assert process.stdin and process.stdout and process.stderr
    process.stdout.close()
    process.stdin.write("\n")
    process.stdin.close()
    assert process.stderr.read() == ""
    assert process.wait() == 0


# --------------------------------------------------------------------------------------------------- in a terminal


def live(out: io.StringIO, width: int, reports: Sequence[StepReport | EvalReport], **changes: Any) -> list[str]:
    from surogate.reporting.live import LiveLogger, TerminalConsole

    console = TerminalConsole(file=out, width=width, height=24, force_terminal=True, legacy_windows=False)
    feed(LiveLogger(info(Path(), **changes), out, console), reports)
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", out.getvalue()).replace("\r", "\n").splitlines()


REPORTS = [
    *(step(n) for n in range(1, 4)),
    evaluation(3),
    step(4, loss=math.nan, norm=math.inf, skipped=True),
    step(1200),
]


@pytest.mark.parametrize("width", [80, 40, 200])
def test_the_display_never_wraps(width: int) -> None:
    lines = live(io.StringIO(), width, REPORTS)
    assert all(len(line) <= width for line in lines if not line.startswith("eval at"))


def test_the_display_shows_progress_numbers_and_evaluations_at_80_columns() -> None:
    lines = live(io.StringIO(), 80, REPORTS)
    assert lines[-2].endswith("1200/1200 100%  eta    0s")
    assert lines[-1].rstrip() == "loss 2.3456  norm 0.12  lr 3.0e-4   125k tok/s  156ms  eval 2.5000  skipped 1"
    assert eval_line(evaluation(3)) in lines


def test_the_display_is_not_complete_before_the_last_evaluation() -> None:
    steps = [step(n, duration_ms=100) for n in (1, 1200)]
    assert live(io.StringIO(), 80, steps, eval_time=400.0, evaluated=(1200,))[-2].endswith("1200/1200  75%  eta   40s")
    done = live(io.StringIO(), 80, [*steps, evaluation(1200, duration_ms=40_000)], eval_time=400.0)
    assert done[-2].endswith("1200/1200 100%  eta    0s")


def test_the_display_leaves_the_cursor_visible_and_stdout_as_it_was() -> None:
    before, out = sys.stdout, io.StringIO()
    live(out, 80, REPORTS)
    assert sys.stdout is before
    assert out.getvalue().rfind("\x1b[?25h") > out.getvalue().rfind("\x1b[?25l")


def test_the_run_continues_when_the_terminal_is_closed() -> None:
    before = sys.stdout
    for lines in (0, 2, 3):
        live(Broken(lines), 80, REPORTS)
        assert sys.stdout is before


def test_stdout_that_is_not_a_terminal_gets_plain_lines(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(open_console(info(Path())), PlainLogger)
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(open_console(info(Path())), PlainLogger)
    monkeypatch.setenv("TERM", "xterm")
    logger = open_console(info(Path()))
    logger.close("done")
    assert type(logger).__name__ == "LiveLogger"


# ------------------------------------------------------------------------------------------------------------ picture


def png_size(path: Path) -> tuple[int, int]:
    data = path.read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and data[-8:-4] == b"IEND"
    width, height = struct.unpack(">II", data[16:24])
    return width, height


def run_of(steps: int, *, offset: int = 0) -> list[StepReport | EvalReport]:
    reports: list[StepReport | EvalReport] = []
    for n in range(offset + 1, offset + steps + 1):
        reports.append(step(n, loss=2 + 8 * math.exp(-n / 20) + 0.1 * math.sin(n), lr=1e-3 * (1 - n / 1200)))
        if n % 10 == 0:
            reports.append(evaluation(n, 2.1 + 8 * math.exp(-n / 20)))
    return reports


@pytest.mark.usefixtures("pictures")
@pytest.mark.filterwarnings("error")
def test_a_name_that_the_font_lacks_is_drawn_without_a_word(tmp_path: Path) -> None:
    assert draw_loss(record(tmp_path, run_of(3), run_name="日本"), tmp_path / "loss.png")


@pytest.mark.usefixtures("pictures")
@pytest.mark.parametrize("steps", [1, 2, 29, 300])
def test_picture_is_a_png_of_the_expected_size(tmp_path: Path, steps: int) -> None:
    record(tmp_path, run_of(steps))
    feed(PictureLogger(info(tmp_path)), run_of(steps))
    assert png_size(tmp_path / "loss.png") == (1350, 750)
    assert 10_000 < (tmp_path / "loss.png").stat().st_size < 1_000_000
    assert sorted(path.name for path in tmp_path.iterdir()) == ["loss.png", "metrics.jsonl"]


def test_no_picture_of_a_run_without_steps_nor_without_a_finite_loss(tmp_path: Path) -> None:
    record(tmp_path, run_of(3))
    feed(PictureLogger(info(tmp_path)), [evaluation(3)])
    assert not (tmp_path / "loss.png").exists()
    (tmp_path / "metrics.jsonl").unlink()
    assert not draw_loss(record(tmp_path, [step(1, loss=math.nan, skipped=True)]), tmp_path / "loss.png")
    assert not (tmp_path / "loss.png").exists()


@pytest.mark.usefixtures("pictures")
def test_skipped_steps_outliers_and_a_zero_learning_rate_are_drawn(tmp_path: Path) -> None:
    reports = [
        *(step(n, loss=1e30 if n == 20 else 2.0, lr=0.0) for n in range(1, 60)),
        step(60, loss=math.nan, norm=math.nan, skipped=True),
        evaluation(60, math.nan),
    ]
    assert draw_loss(record(tmp_path, reports), tmp_path / "loss.png")


def test_a_picture_that_cannot_be_drawn_is_a_message_and_not_an_error(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    feed(PictureLogger(info(tmp_path)), run_of(3))  # metrics.jsonl does not exist
    assert re.match(r".*loss\.png was not drawn: .*No such file.*metrics\.jsonl", capsys.readouterr().err)


def test_the_curve_of_a_resumed_run_begins_at_its_first_step_and_repeats_none(tmp_path: Path) -> None:
    record(tmp_path, run_of(50))
    curve = read_curve(record(tmp_path, run_of(30, offset=40)))
    assert [point.step for point in curve.train] == list(range(1, 71))
    assert [point.step for point in curve.evals] == [10, 20, 30, 40, 50, 60, 70]
    assert sum(point.tokens for point in curve.train) == 70 * 16000


def test_the_curve_of_a_run_restarted_in_the_same_folder_is_that_of_the_new_run(tmp_path: Path) -> None:
    record(tmp_path, run_of(50), run_name="old")
    curve = read_curve(record(tmp_path, [evaluation(0, 9.0), *run_of(12)], run_name="new"))
    assert curve.title == "new"
    assert [point.step for point in curve.train] == list(range(1, 13))
    assert [point.step for point in curve.evals] == [0, 10]


@pytest.mark.usefixtures("pictures")
def test_the_best_evaluation_is_marked_by_the_rule_of_the_run_or_by_the_loss(tmp_path: Path) -> None:
    held = [evaluation(10, 2.0), evaluation(20, 3.0), evaluation(30, 2.5)]
    path = record(tmp_path, [*run_of(30)[:30], *held])
    assert read_curve(path).best_eval.step == 10
    draw_loss(path, tmp_path / "by_loss.png")
    path.unlink()
    path = record(tmp_path, [*run_of(30)[:30], *(replace(one, best_step=20) for one in held)])
    assert read_curve(path).best_eval.step == 20
    draw_loss(path, tmp_path / "by_rule.png")
    assert (tmp_path / "by_loss.png").read_bytes() != (tmp_path / "by_rule.png").read_bytes()


def test_smoothing_ignores_a_spike_and_keeps_a_straight_line_to_its_ends() -> None:
    line = np.linspace(8.0, 2.0, 101)
    assert smooth(line, 9) == pytest.approx(line)
    spiked = line.copy()
    spiked[50] = 1e6
    assert smooth(spiked, 9) == pytest.approx(line, abs=0.1)


def test_a_long_run_is_reduced_to_the_points_that_are_visible() -> None:
    steps, losses = thin_out(np.arange(1.0, 100_001.0), np.linspace(8.0, 2.0, 100_000))
    assert len(steps) == len(losses) == 1500
    assert losses == pytest.approx(8 - 6 * (steps - 1) / 99_999)


# ------------------------------------------------------------------------------------------------------------ summary


def summary(**facts: Any) -> list[str]:
    out = io.StringIO()
    known: dict[str, Any] = {"run_name": "run", "output_dir": Path("out"), "checkpoint_dir": Path("out"), "steps": 1}
    known |= {"total_steps": 1, "tokens": 10, "seconds": 1.0, "loss": None, "evaluations": ()}
    known |= {"unigram_loss": None, "bits_per_byte": None, "signal_exit": 0}
    print_summary(out, TrainResult(**{**known, **facts}))
    return [line.rstrip() for line in out.getvalue().splitlines()]


def test_summary_has_every_number_in_80_columns() -> None:
    lines = summary(
        run_name="quickstart [red]",
        steps=1600,
        tokens=9_830_400,
        seconds=124.3,
        output_dir=Path("output/quickstart"),
        loss=3.21,
        evaluations=((800, 3.29, 10), (1600, 3.3, 10)),
        unigram_loss=6.1,
        bits_per_byte=1.83,
        commands=(("vLLM", "vllm serve output/quickstart"), ("long", "x" * 100)),
    )
    ruler = " " + "\u2500" * 78
    assert lines == [
        "quickstart [red]: done, 1,600 steps",
        ruler,
        "  trained           9.83M tokens in 2 min 04 s, 79.1k tokens/s",
        "  training loss     3.2100 nats per token, of the last step",
        "  validation loss   3.3000 nats per token, best 3.2900",
        "  unigram model     6.1000; this model is 2.8000 below",
        "  bits per byte     1.8300",
        "  output            output/quickstart",
        "                    the model, metrics.jsonl, loss.png, run.yaml",
        ruler,
        "  vLLM",
        "    vllm serve output/quickstart",
        "  long",
        "    " + "x" * 100,  # not wrapped, so that it can be copied
        "  report",
        "    surogate report output/quickstart --html report.html",
    ]


def test_summary_and_lines_show_pairs_utilization_and_the_headlines_of_the_loss() -> None:
    lines = summary(
        in_nats=False, loss=0.41, tokens=1_000_000, seconds=10.0, mfu=0.412, group="pairs", groups_per_second=12.34,
        headlines=("rewards/margins", "rewards/accuracies"), evaluation_metrics={"rewards/margins": 0.5},
        step_metrics={"rewards/margins": 0.52345, "rewards/accuracies": 0.75, "logps/chosen": -30.0},
    )  # fmt: skip
    assert lines[2:6] == [
        "  trained              1.00M tokens in 10.0 s, 100k tokens/s",
        "                       12.3 pairs/s, mfu 41%",
        "  training loss        0.4100, of the last step",
        "  rewards/margins      0.5234 in the last step, 0.5 in validation",
    ]
    assert lines[6] == "  rewards/accuracies   0.75 in the last step" and "logps" not in "".join(lines)
    line = step_line(step(100, mfu=0.412), 200, 90.0)
    assert "mfu 41%" in line and len(line) <= 80
    assert len(step_line(step(1000, mfu=0.412), 2000, 90.0)) <= 80


def test_metrics_of_steps_and_evaluations_are_lines_of_80_columns(tmp_path: Path) -> None:
    names = ("rewards/chosen", "rewards/rejected", "rewards/margins", "rewards/accuracies", "logps/chosen", "nll_loss")
    metrics = dict.fromkeys(names, -12.345678)
    out = io.StringIO()
    reports = [step(1, metrics=metrics, groups=4, groups_per_second=4.444), replace(evaluation(1), metrics=metrics)]
    feed(PlainLogger(info(tmp_path, group="pairs"), out), reports)
    lines = out.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    assert all("".join(lines).count(f"{name.replace('_', ' ')} -12.35") == 2 for name in names)
    assert lines[1].startswith("  rewards/chosen -12.35, rewards/rejected -12.35,") and "4.44 pairs/s" in lines[2]


def test_records_of_pairs_and_utilization_are_written_where_there_are_some(tmp_path: Path) -> None:
    reports = [step(1, groups=8, groups_per_second=4.0, mfu=0.4, metrics={"rewards/margins": 0.1}), step(2)]
    run, first, second = parse(record(tmp_path, reports, headlines=("rewards/margins",), group="pairs"))
    assert run["headlines"] == ["rewards/margins"]
    assert (first["groups_per_second"], first["mfu"]) == (4.0, 0.4) and set(second) == STEP_KEYS


@pytest.mark.usefixtures("pictures")
def test_the_picture_has_a_panel_for_each_headline_that_was_measured(tmp_path: Path) -> None:
    reports = [step(n, metrics={"rewards/margins": n / 10}) for n in (1, 2, 3)]
    path = record(tmp_path, [*reports, evaluation(3)], headlines=("rewards/margins", "rewards/accuracies"))
    plain = record(tmp_path / "plain", [step(n) for n in (1, 2, 3)])
    assert draw_loss(path, tmp_path / "a.png") and draw_loss(plain, tmp_path / "b.png")
    assert (png_size(tmp_path / "a.png"), png_size(tmp_path / "b.png")) == ((1350, 1200), (1350, 750))


def test_summary_omits_what_is_not_known() -> None:
    lines = summary(seconds=0.0)
    assert [line.split("  ")[1] for line in lines[2:4]] == ["trained", "output"]
    assert not any("tokens/s" in line for line in lines)


def test_summary_marks_a_model_worse_than_unigram() -> None:
    assert any("worse than guessing by word" in line for line in summary(evaluations=((1, 7.0, 10),), unigram_loss=6.0))


def test_records_after_the_checkpoint_and_repeated_records_are_removed(tmp_path: Path) -> None:
    """A run to step 3, one that restarted and reached step 2, a partial line, and one that resumes from step 2."""
    path = tmp_path / "metrics.jsonl"
    first = ["run a", "step 1", "eval 1", "step 2", "step 3", "eval 3"]
    again = ["run b", "step 1", "eval 1", "step 2", "gpu 2", "step 3"]
    lines = []
    for log, at in (record.split() for record in first + again):
        lines.append(json.dumps({"log": log, "run": at} if log == "run" else {"log": log, "step": int(at)}))
    path.write_text("\n".join(lines) + '\n{"log": "step", "st')
    cut_metrics(path, 2)
    left = [f"{record['log']} {record.get('step', record.get('run'))}" for record in read_metrics(path)]
    assert left == ["run a", "run b", "step 1", "eval 1", "step 2", "gpu 2"]
    assert path.read_bytes().endswith(b"}\n")
    assert [file.name for file in tmp_path.iterdir()] == ["metrics.jsonl"]
    cut_metrics(tmp_path / "absent", 2)


@pytest.mark.parametrize("evaluated", [True, False])
def test_an_evaluation_that_a_resumed_run_repeats_is_recorded_once(evaluated: bool, tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    lines = [{"log": "step", "step": 2}, {"log": "eval", "step": 2}, {"log": "step", "step": 3}]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    cut_metrics(path, 2, evaluated=evaluated)
    assert list(read_metrics(path)) == lines[: 1 + evaluated]


@pytest.mark.parametrize("sampled", [True, False])
def test_samples_that_a_resumed_run_repeats_are_recorded_once(sampled: bool, tmp_path: Path) -> None:
    """The run began again before its first save, so the samples before its first step are there twice."""

    def of(step: int, index: int, text: str) -> dict[str, object]:
        return {"log": "sample", "step": step, "index": index, "text": text}

    path = tmp_path / "metrics.jsonl"
    earlier = [of(0, 0, "a"), of(0, 1, "b"), {"log": "step", "step": 1}]
    later = [of(0, 0, "c"), of(0, 1, "d"), {"log": "step", "step": 1}, {"log": "step", "step": 2}]
    after = [of(2, 0, "e"), of(2, 1, "f")]
    path.write_text("".join(json.dumps(line) + "\n" for line in [*earlier, *later, *after, of(3, 0, "g")]))
    cut_metrics(path, 2, sampled=sampled)
    assert list(read_metrics(path)) == [*later, *(after if sampled else [])]


def test_a_sample_is_a_few_lines_that_no_terminal_obeys() -> None:
    text = "It is \x1b[2J I.\n" + "A word of a long line. " * 40
    how = {"tokens": 99, "finish": "length", "duration_ms": 1.0, "time": 0.0}
    blank = sample_lines(SampleReport(step=3, index=0, prompt="Who", text="\n\n", **how))
    assert blank == ["sample at step 3: Who", "  (nothing that can be seen)"]
    lines = sample_lines(SampleReport(step=3, index=0, prompt="Who\nis " + "it " * 40, text=text, **how))
    assert lines[0].startswith("sample at step 3: ...") and len(lines[0]) <= 80
    assert lines[1] == "  It is \\x1b[2J I." and lines[-1] == "  ..." and len(lines) == 8
    assert all(len(line) <= 80 for line in lines)
