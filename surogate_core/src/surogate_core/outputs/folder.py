"""The folders of a run before its first step: made, cleared of what a killed save has left, no two runs in one."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from ..checkpoint import folders as checkpoint
from ..checkpoint.adapter import MERGED_FOLDER
from ..checkpoint.folders import SAVING
from ..checkpoint.resume import Resumed, is_of, refuse_checkpoints
from ..config.load import LoadedConfig, dump_yaml, resolved
from ..errors import ConfigError
from ..planning.run import Run
from ..planning.versions import library_versions
from ..reporting.metrics import METRICS_FILE, cut_metrics
from .earlier_work import has_steps, is_foreign, refuse_metrics, refuse_outputs, set_aside_outputs

Notice = Callable[[str], None]

RUN_FILE = "run.yaml"
HEADER = "# surogate-core "
"""What the first line of a resolved config begins with."""


def records_file(loaded: LoadedConfig) -> Path:
    """Where the run's metrics go."""
    config = loaded.config
    return Path(config.output_dir) / METRICS_FILE if config.log_file is None else Path(config.log_file)


def refuse_to_overwrite(run: Run) -> None:
    """Raise ConfigError where an output would replace the model that is trained."""
    config = run.config
    output = Path(config.output_dir)
    if config.merge_adapter and config.adapter is not None:
        output = output / MERGED_FOLDER
    if output.exists() and output.samefile(run.model_dir):
        raise ConfigError(
            f"{run.loaded.source}: output_dir: {output} is the directory of the model that is trained; its "
            "weights would be replaced. Name another directory."
        )


def open_output(loaded: LoadedConfig, notice: Notice) -> None:
    """Make the folders, clear what a killed save has left, and write run.yaml: the resolved config and versions."""
    config = loaded.config
    output, checkpoints = Path(config.output_dir), Path(config.resolved_checkpoint_dir)
    try:
        output.mkdir(parents=True, exist_ok=True)
        checkpoints.mkdir(parents=True, exist_ok=True)
        _write_run_file(output, loaded)
    except OSError as error:
        raise ConfigError(f"output_dir: cannot write to {error.filename or output}: {error.strerror}.") from None
    for leftover in {*checkpoint.remove_leftovers(checkpoints), *checkpoint.remove_leftovers(output)}:
        notice(f"removed {leftover.name}, left by a save that was killed")


def _write_run_file(output: Path, loaded: LoadedConfig) -> None:
    """Write run.yaml at once or not at all: a truncated one would look like a file of the user to the next run."""
    header = "".join(f"# {name} {version}\n" for name, version in library_versions().items())
    fresh = output / f"{SAVING}{RUN_FILE}"
    fresh.write_text(header + dump_yaml(resolved(loaded)), encoding="utf-8")
    os.replace(fresh, output / RUN_FILE)


@dataclass(frozen=True)
class Own:
    """Which places of a run are its own from before: those that it goes on in. The others must hold no earlier run."""

    checkpoints: bool
    output: bool
    records: bool

    @classmethod
    def of(cls, loaded: LoadedConfig, resumed: Resumed | None) -> Own:
        if resumed is None:
            return cls(False, False, False)
        config, saved = loaded.config, resumed.manifest.config
        output = Path(config.output_dir)
        saved_output = Path(str(saved.get("output_dir")))
        is_own = is_of(resumed, output) or saved_output.resolve() == output.resolve()
        records = records_file(loaded)
        saved_records = Path(str(saved.get("log_file") or saved_output / METRICS_FILE))
        beside = is_own and records.resolve().parent == output.resolve()  # also of a folder that was renamed
        return cls(
            checkpoints=is_of(resumed, Path(config.resolved_checkpoint_dir)),
            output=is_own,
            records=beside or saved_records.resolve() == records.resolve(),
        )


def refuse_earlier_work(loaded: LoadedConfig, resumed: Resumed | None) -> None:
    """Raise ConfigError where outputs, checkpoints or metrics of this run would replace, or mix with, something else.

    `overwrite_output_dir: true` allows what is an earlier run's. Where a checkpoint was asked for and none is there,
    metrics alone are no reason: the run was stopped before its first save.
    """
    config, source, own = loaded.config, loaded.source, Own.of(loaded, resumed)
    output, checkpoints, records = Path(config.output_dir), Path(config.resolved_checkpoint_dir), records_file(loaded)
    if config.log_file is not None and is_foreign(records):
        raise ConfigError(f"{source}: log_file: {records} holds no metrics of a run. Name another file.")
    if config.overwrite_output_dir:
        return
    if _is_users(output / RUN_FILE):
        raise ConfigError(
            f"{source}: output_dir: {output / RUN_FILE} was not written by a run, and the resolved config would "
            "replace it. Move it, name another output_dir, or say overwrite_output_dir: true, which sets it aside."
        )
    if not own.checkpoints:
        refuse_checkpoints(checkpoints, "checkpoint_dir" if config.checkpoint_dir else "output_dir", source)
    begins_again = resumed is None and config.resume_from_checkpoint is not False
    if not own.output:
        refuse_outputs(output, "output_dir", source, with_metrics=not begins_again)
    if config.log_file is not None and not own.records and not begins_again:
        refuse_metrics(records, source)


def set_aside(loaded: LoadedConfig, resumed: Resumed | None, notice: Notice) -> None:
    """Leave of earlier work what this run goes on from, and rename the rest."""
    config, own = loaded.config, Own.of(loaded, resumed)
    output, checkpoints, records = Path(config.output_dir), Path(config.resolved_checkpoint_dir), records_file(loaded)
    step = resumed.step if resumed is not None and own.checkpoints else -1
    why = f"the run goes on from step {step:,}" if own.checkpoints else "a new run begins"
    moved: list[Path] = []
    try:
        # Before the records are cut: killed in between, they reach beyond the newest checkpoint, never the reverse.
        moved += checkpoint.set_aside(checkpoints, after=step)
        if not own.records and has_steps(records):
            moved.append(checkpoint.aside(records))
        if not own.output:
            moved += set_aside_outputs(output, read=[Path(config.model)])
        if _is_users(output / RUN_FILE):
            moved.append(checkpoint.aside(output / RUN_FILE))
    except OSError as error:
        raise ConfigError(f"output_dir: cannot set aside {error.filename or output}: {error.strerror}.") from None
    for path in moved:
        notice(f"{path.name}: set aside, since {why}")
    if resumed:
        cut_metrics(records, resumed.step)


def _is_users(path: Path) -> bool:
    """Whether there is a file that `open_output` has not written."""
    return path.is_file() and not path.read_bytes().startswith(HEADER.encode())
