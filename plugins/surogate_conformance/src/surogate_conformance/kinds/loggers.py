"""Checks of loggers. Examples are keys of their options; `environment` sets variables."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from surogate_core.api import (
    CallbackReport,
    EndReport,
    EvalReport,
    GpuReport,
    Logger,
    LoggerDef,
    NumericsColumn,
    NumericsReport,
    OutputReport,
    QuantizedTensor,
    RunInfo,
    SampleReport,
    StepReport,
)
from surogate_core.errors import ConfigError

from ..bench import Bench, quiet
from ..check import NotApplicable, proves


def _info(folder: Path, done: int = 0) -> RunInfo:
    return RunInfo(
        run_name="tiny",
        output_dir=folder,
        total_steps=4,
        steps_per_epoch=4,
        tokens_per_step=64,
        config={"learning_rate": 1e-3, "datasets": [{"path": "text.jsonl"}], "adapter": None},
        versions={"torch": "2"},
        device="cpu",
        parameters=10,
        trainable_parameters=10,
        done_steps=done,
    )


def _step(number: int, loss: float, skipped: bool = False) -> StepReport:
    return StepReport(
        step=number,
        epoch=number / 4,
        loss=loss,
        norm=0.5,
        lr=1e-3,
        tokens=64,
        valid_tokens=60,
        tokens_per_second=1e3,
        duration_ms=64.0,
        time=1e9 + number,
        skipped=skipped,
    )


def _gpu(known: bool) -> GpuReport:
    figures = {
        "utilization": 0.5,
        "memory_utilization": 0.5,
        "memory_used_bytes": 1 << 30,
        "memory_total_bytes": 1 << 31,
        "power_watts": 300.0,
        "power_limit_watts": 700.0,
        "temperature_celsius": 50,
        "sm_clock_mhz": 1000,
        "memory_clock_mhz": 1000,
    }
    return GpuReport(step=1, gpu=0, time=1e9, **(figures if known else dict.fromkeys(figures)))


def _outputs(best_step: int | None, best_value: float | None) -> OutputReport:
    best: Any = {"best_step": best_step, "best_value": best_value}
    return OutputReport(step=2, weights_step=2, metric="loss", stop_reason="", time=1e9, **best)


def _numerics() -> NumericsReport:
    columns = (NumericsColumn("amax", "magnitude", "largest magnitude"),)
    return NumericsReport(
        step=2, tensors=(QuantizedTensor("blocks.0.qkv", 0),), columns=columns, values=((1.5,),), time=1e9
    )


def _sample(index: int, text: str) -> SampleReport:
    return SampleReport(
        step=2, index=index, prompt="a prompt", text=text, tokens=9, finish="stop", duration_ms=3.0, time=1e9
    )


@contextmanager
def _opened(definition: LoggerDef, bench: Bench, folder: Path, done: int = 0) -> Iterator[Logger]:
    example = dict(next(iter(bench.subject.examples(definition)), {}))
    variables = {k: str(v).format(folder=folder) for k, v in example.pop("environment", {}).items()}
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        with quiet():
            try:
                definition.check(folder, definition.options(**example))
                logger = definition.open(_info(folder, done), definition.options(**example))
            except ConfigError as error:
                where = f'SUROGATE_EXAMPLES = {{"logger {definition.name}": [{{"environment": {{...}}}}]}}'
                raise NotApplicable(f"it does not open here: {error} Give an example: {where}") from None
            yield logger
    finally:
        os.environ.clear()
        os.environ.update(before)


@proves("logger", remedy="A report of each kind must not fail; figures of GPUs may be None, a loss NaN.")
def it_takes_a_report_of_every_kind(definition: LoggerDef, bench: Bench) -> None:
    with _opened(definition, bench, bench._new("log")) as logger:
        for name in ("report", "close"):
            assert callable(getattr(logger, name, None)), f"it has no method {name}; a subclass of Logger has it"
        logger.report(_step(1, 2.5))
        logger.report(_step(2, float("nan"), skipped=True))
        for best in (None, 2):
            logger.report(EvalReport(step=2, loss=2.25, valid_tokens=60, duration_ms=3.0, time=1e9, best_step=best))
        for known in (True, False):
            logger.report(_gpu(known))
        logger.report(_numerics())
        for best, value in ((2, 2.25), (None, None)):
            logger.report(_outputs(best, value))
        for index, text in enumerate(("a text\nof \x1b two lines", "")):
            logger.report(_sample(index, text))
        logger.report(CallbackReport(step=2, metrics={"accuracy": 0.5, "worst": float("nan")}, time=1e9))
        logger.report(EndReport(step=2, status="failed", message="RuntimeError: a cause", time=1e9))
        logger.close("failed")


@proves("logger", remedy="`open` of a resumed run continues (RunInfo.done_steps); `close` may follow no report at all.")
def it_closes_without_a_report_and_continues_a_resumed_run(definition: LoggerDef, bench: Bench) -> None:
    folder = bench._new("log")
    for done, status in ((0, "failed"), (2, "interrupted")):
        with _opened(definition, bench, folder, done) as logger:
            if done:
                logger.report(_step(done + 1, 2.0))
            logger.close(status)


@proves("logger", remedy="Write below RunInfo.output_dir, or where its options say.")
def it_does_not_change_the_environment_of_the_run(definition: LoggerDef, bench: Bench) -> Any:
    where, before = os.getcwd(), set(os.listdir())
    with _opened(definition, bench, bench._new("log")) as logger:
        logger.report(_step(1, 2.5))
        logger.close("done")
        assert os.getcwd() == where, "it changes the working directory"
    new = sorted(set(os.listdir()) - before)
    return [f"it wrote {', '.join(new)} into the working directory"] if new else []
