"""The package `surogate` in Python: the commands as functions, with the keys of a config as keyword arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from surogate_core.errors import ConfigError, PluginError

from . import run
from .data.given_rows import UNREAD, RowsCache, Store, unread, with_paths
from .run import LoadedConfig, Notice, Plan, TrainResult
from .training.callbacks import Callback, ReportCallback

if TYPE_CHECKING:
    from surogate_verify.verification import Verification

    from .data.tokenized import Tokenized
    from .pages.reports import RunReport

Config = str | Path | Mapping[str, Any]
"""A YAML file, or a mapping of its keys."""

Mode = Literal["train", "pt", "sft"]
Callbacks = ReportCallback | Callback | Sequence[ReportCallback | Callback]
"""A function of a report, what `every` makes, or several of both, which are called in their order."""


@dataclass(frozen=True, kw_only=True)
class Result(TrainResult):
    """The result of a run: `output_dir`, `steps`, the last `loss`, `evaluations`, and what `TrainResult` has.

    metrics_file  what the run has recorded, a JSON object a line
    """

    metrics_file: Path

    @property
    def stopped(self) -> bool:
        """Whether a callback, a signal or early stopping ended the run. It is saved; after a signal without outputs."""
        return self.signal_exit != 0 or self.steps < self.total_steps

    @cached_property
    def metrics(self) -> list[dict[str, Any]]:
        """The records of `metrics_file`, of all parts of a run that was resumed."""
        return [json.loads(line) for line in self.metrics_file.read_text(encoding="utf-8").splitlines()]

    @property
    def losses(self) -> list[float | None]:
        """The training loss of each step; None where it was not finite."""
        return [record["loss"] for record in self.metrics if record["log"] == "step"]


def load(config: Config, *, mode: Mode = "train", **keys: Any) -> LoadedConfig:
    """Read and validate a config. `keys` replace those of the file. Raises ConfigError naming file and key.

    Data in memory is not read.
    """
    given, overrides = _keys(config, keys, unread)
    return run.load(given, overrides, mode)


def _load(config: Config, mode: Mode, keys: Mapping[str, Any], store: Store) -> LoadedConfig:
    """Load a config. store: what becomes of data in memory, once the config is known to be right."""
    loaded = load(config, mode=mode, **keys)
    entries = (*loaded.config.datasets, *(loaded.config.validation_datasets or ()))
    if all(entry.path != UNREAD for entry in entries):
        return loaded
    given, overrides = _keys(config, keys, store)
    return run.load(given, overrides, mode)


def _keys(config: Config, keys: Mapping[str, Any], store: Store) -> tuple[Config, list[str]]:
    """Return config and overrides as `run.load` takes them."""
    given = with_paths(keys, store)
    if isinstance(config, Mapping):
        config = with_paths({key: value for key, value in config.items() if key not in given}, store)
    return config, [f"{key}={json.dumps(value, default=str)}" for key, value in given.items()]


def plan(config: Config, *, mode: Mode = "train", device: str | None = None, nodes: int = 1, **keys: Any) -> Plan:
    """Plan a run: `.report.fits`, `.report.device_bytes["total"]`, `.report.tokens_per_second`.

    `device`: a name such as "h200"; None: what a run on this machine would train on.
    """
    return run.plan(load(config, mode=mode, **keys), device, nodes=nodes)


def tokenize(
    config: Config, *, mode: Mode = "train", documents: bool = False, notice: Notice = print, **keys: Any
) -> Tokenized:
    """Tokenise, pack and check the data of a run, as `train` does first: counts, lengths, and what is left out.

    documents: also the shortest, the median and the longest document of each entry, with what is trained of it. Takes
    data in memory as `train` does. Needs no GPU, and no weights. Raises ConfigError, with the row, for data that cannot
    be trained on.
    """
    from .data.tokenized import documents as documents_of
    from .data.tokenized import tokenized

    loaded = _load(config, mode, keys, RowsCache(notice).store)
    data = run.tokenize(loaded, notice)
    return tokenized(loaded, data, list(documents_of(loaded, data)) if documents else ())


def verify(
    config: Config,
    *,
    mode: Mode = "train",
    rows: int = 2,
    length: int | None = None,
    layers: int | None = None,
    random_tokens: bool = False,
    notice: Notice = print,
    **keys: Any,
) -> Verification:
    """Compare model and recipe of a run with transformers, layer by layer, on this machine. Writes no output.

    rows: of the batch. length: tokens of a row; None: `sequence_len`, at most 512. layers: the first N only; None: all.
    random_tokens: in place of the run's data. The result has `.passed`, `.first_wrong`, and `.verdict.rows` with the
    relative error of each output and gradient, and what is allowed. Raises ConfigError for what cannot be compared or
    does not fit, and PluginError if the package surogate-verify is not installed.
    """
    try:
        from surogate_verify.verification import Extent
        from surogate_verify.verification import verify as compare
    except ModuleNotFoundError as error:
        raise PluginError(f"verify: {error}. Install it: pip install surogate-verify.") from error
    if rows < 1 or (layers is not None and layers < 1):
        raise ConfigError(f"verify: rows is {rows} and layers is {layers}. Both are 1 or more.")
    load(config, mode=mode, **keys)  # before data is read
    given, overrides = _keys(config, keys, unread if random_tokens else RowsCache(notice).store)
    return compare(given, overrides, Extent(rows, length, layers, random_tokens), mode=mode, notice=notice)


def report(
    folder: str | Path,
    other: str | Path | None = None,
    *,
    html: str | Path | None = None,
    profile: str | Path | None = None,
) -> tuple[RunReport, ...]:
    """Return what came of a run, or of two beside each other: state, figures and what stands out.

    folder: the output of a run, which may be training. html: a page to write, one file, in place of an earlier page
    only. profile: a file of `surogate profile --json`, whose times the page has. Raises ConfigError for a folder that
    is no run and for a path that cannot be written.
    """
    from .pages.reports import read_reports, run_report

    paths = [None if path is None else Path(path) for path in (other, html, profile)]
    runs, _ = read_reports(Path(folder), *paths)
    return tuple(map(run_report, runs))


def train(
    config: Config,
    *,
    mode: Mode = "train",
    callback: Callbacks | None = None,
    notice: Notice = print,
    **keys: Any,
) -> Result:
    """Train, and return losses and folders. `keys` replace those of the file.

    In place of the `path` of an entry of `datasets` and `validation_datasets` stands data in memory, or in place of the
    entry or of the list: rows, a `datasets.Dataset` or `IterableDataset`, a generator, a function that returns one.
    They are read once, before the run.

    `callback` is called after each step with a `StepReport`, and after each evaluation with an `EvalReport`; one that
    `every` makes is called between steps with an `ActiveRun`. If it returns True, the run finishes early: after the
    step that is running it is saved, so that it can be resumed, evaluated, and its outputs are written. If it raises,
    the run is saved and ends with a CallbackError that names it. `notice` is called with each line that a run prints.
    Raises ConfigError for what cannot be used, with the row of data, and RunStopped if the run stops itself.
    """
    several = callback if isinstance(callback, Sequence) else [] if callback is None else [callback]
    loaded = _load(config, mode, keys, RowsCache(notice).store)
    found = run.train(loaded, notice, callbacks=several)
    values = {field.name: getattr(found, field.name) for field in fields(TrainResult)}
    return Result(**values, metrics_file=Path(loaded.config.log_file or found.output_dir / "metrics.jsonl"))


def sft(config: Config, *, callback: Callbacks | None = None, notice: Notice = print, **keys: Any) -> Result:
    """As `train`, with the defaults for fine-tuning: LoRA."""
    return train(config, mode="sft", callback=callback, notice=notice, **keys)


def pt(config: Config, *, callback: Callbacks | None = None, notice: Notice = print, **keys: Any) -> Result:
    """As `train`, with the defaults for pre-training: all weights."""
    return train(config, mode="pt", callback=callback, notice=notice, **keys)
