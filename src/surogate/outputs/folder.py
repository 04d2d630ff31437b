"""The folders of a run: created before its first step, cleaned up after a killed save, never shared by two runs."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from surogate_core.api.destination import RUN_FILE, refuse_checkpoint
from surogate_core.errors import ConfigError
from surogate_core.planning.plan import Plan

from ..checkpoints import folders as checkpoint
from ..checkpoints.adapter import MERGED_FOLDER
from ..checkpoints.folders import SAVING
from ..checkpoints.resume import LAST_GOOD, Resumed, refuse_checkpoints
from ..config.dataset_entry import DatasetEntry
from ..config.load import LoadedConfig, published
from ..config.schema import TrainConfig
from ..config.yaml import dump_yaml
from ..hub.files import find_local
from ..machine.replaced_file import replaced
from ..reporting.metrics import cut_metrics, finite, metrics_path
from ..runs.disk import disk_use
from ..runs.plan_json import PLAN_FILE, timeline_json, to_json
from ..runs.run import Run
from .earlier_work import has_steps, is_foreign, refuse_outputs, set_aside_outputs
from .load_commands import load_commands

Notice = Callable[[str], None]

KeysT = TypeVar("KeysT", TrainConfig, DatasetEntry)

_WRITTEN = ("output_dir", "checkpoint_dir", "log_file")
_READ = ("model", "adapter_path", "resume_from_checkpoint", "path")
"""Keys with paths: those of files that a run writes, and those that may be local."""

HEADER = "# surogate-core "
"""The first line of a resolved config begins with this."""

_PLAN_START = '{"fits":'
"""The beginning of the plan of a run, which no line break follows."""


def refuse_to_overwrite(run: Run) -> None:
    """Raise ConfigError if an output would replace the model that is trained."""
    config = run.config
    output = Path(config.output_dir)
    if config.merge_adapter and config.adapter is not None:
        output = output / MERGED_FOLDER
    if output.exists() and output.samefile(run.model_dir):
        raise ConfigError(
            f"{run.loaded.source}: output_dir: {output} is the directory of the model that is trained; its "
            "weights would be replaced. Name another directory."
        )


def open_output(loaded: LoadedConfig, versions: Mapping[str, str], notice: Notice) -> None:
    """Create the folders, remove what killed saves left, and write run.yaml: the resolved config and `versions`."""
    config = loaded.config
    output, checkpoints = Path(config.output_dir), Path(config.resolved_checkpoint_dir)
    try:
        output.mkdir(parents=True, exist_ok=True)
        checkpoints.mkdir(parents=True, exist_ok=True)
        _write_run_file(output, loaded, versions)
    except OSError as error:
        raise ConfigError(f"output_dir: cannot write to {error.filename or output}: {error.strerror}.") from None
    for leftover in {*checkpoint.remove_leftovers(checkpoints), *checkpoint.remove_leftovers(output)}:
        notice(f"removed {leftover.name}, left by a save that was killed")


def _write_run_file(output: Path, loaded: LoadedConfig, versions: Mapping[str, str]) -> None:
    """Write run.yaml atomically: the next run would take a truncated one for a file of the user.

    Its local paths are absolute, so that it describes the same run in every folder.
    """
    entries = {key: getattr(loaded.config, key) for key in ("datasets", "validation_datasets")}
    absolute = {key: tuple(map(_with_absolute_paths, found)) for key, found in entries.items() if found}
    loaded = replace(loaded, config=_with_absolute_paths(loaded.config).model_copy(update=absolute))
    header = "".join(f"# {name} {version}\n" for name, version in versions.items())
    fresh = output / f"{SAVING}{RUN_FILE}"
    fresh.unlink(missing_ok=True)
    with fresh.open("x", encoding="utf-8") as file:  # a new file, never what a link of this name points to
        file.write(header + dump_yaml(published(loaded)))
    os.replace(fresh, output / RUN_FILE)


def write_plan(run: Run, planned: Plan) -> None:
    """Write plan.json: the plan, with the memory over all ops and the commands that load the outputs.

    With it a report needs neither the model nor the device. Raises ConfigError if it cannot be written.
    """
    document = to_json(planned, run.loaded.mode, "the device of the run", disk=disk_use(run, planned))
    document["timeline"] = timeline_json(planned.memory_timeline())
    document["commands"] = load_commands(run)
    path = Path(run.config.output_dir) / PLAN_FILE
    try:
        with replaced(path) as fresh:
            fresh.write_text(json.dumps(finite(document), separators=(",", ":"), default=str) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"output_dir: cannot write to {path}: {error.strerror or error}.") from None


def _with_absolute_paths(keys: KeysT) -> KeysT:
    """Return `keys` with absolute paths of what is local: a model or a dataset may be one of the Hub."""
    given = {key: getattr(keys, key, None) for key in (*_WRITTEN, *_READ)}
    texts = {key: text for key, text in given.items() if isinstance(text, str) and text != LAST_GOOD}
    local = [key for key, text in texts.items() if key in _WRITTEN or find_local(text) or glob.has_magic(text)]
    return keys.model_copy(update={key: os.path.abspath(os.path.expanduser(texts[key])) for key in local})


@dataclass(frozen=True)
class Places:
    """The folders that a run writes to, and those that it owns: a resumed run continues in them.

    Places that it does not own must hold no earlier run.
    """

    output: Path
    checkpoints: Path
    metrics: Path
    owns_output: bool = False
    owns_checkpoints: bool = False
    owns_metrics: bool = False


def places_of(loaded: LoadedConfig, resumed: Resumed | None) -> Places:
    """Return the places of a run. A new one (`resumed` is None) owns none of them."""
    config = loaded.config
    output, checkpoints = Path(config.output_dir), Path(config.resolved_checkpoint_dir)
    metrics = metrics_path(output, config.log_file)
    if resumed is None:
        return Places(output, checkpoints, metrics)
    saved = resumed.manifest.config
    saved_output = Path(str(saved.get("output_dir")))
    saved_metrics = metrics_path(saved_output, str(saved.get("log_file") or ""))
    owns_output = resumed.is_in(output) or saved_output.resolve() == output.resolve()
    in_own_output = owns_output and metrics.resolve().parent == output.resolve()  # the folder may have been renamed
    return Places(
        output,
        checkpoints,
        metrics,
        owns_output=owns_output,
        owns_checkpoints=resumed.is_in(checkpoints),
        owns_metrics=in_own_output or saved_metrics.resolve() == metrics.resolve(),
    )


def refuse_earlier_work(loaded: LoadedConfig, resumed: Resumed | None) -> None:
    """Raise ConfigError if outputs, checkpoints or metrics of the run would replace others or mix with them.

    `overwrite_output_dir: true` allows this for an earlier run's. If a run is to be resumed and there is no checkpoint,
    metrics and their picture are allowed too: it was stopped, or stopped itself, before its first save.
    """
    config, source, places = loaded.config, loaded.source, places_of(loaded, resumed)
    if config.log_file is not None:
        _refuse_log_file(places.metrics, source)
    if config.overwrite_output_dir:
        return
    for path, what in _users_files(places.output).items():
        raise ConfigError(
            f"{source}: output_dir: {path} was not written by a run, and {what} would "
            "replace it. Move it, name another output_dir, or set overwrite_output_dir: true, which sets it aside."
        )
    if not places.owns_checkpoints:
        refuse_checkpoints(places.checkpoints, "checkpoint_dir" if config.checkpoint_dir else "output_dir", source)
    starts_over = resumed is None and config.resume_from_checkpoint is not False
    if not places.owns_output:
        refuse_outputs(places.output, "output_dir", source, with_metrics=not starts_over)
    if config.log_file is not None and not places.owns_metrics and not starts_over and has_steps(places.metrics):
        raise ConfigError(
            f"{source}: log_file: {places.metrics} holds the metrics of an earlier run. Name another log_file, or set "
            "overwrite_output_dir: true, which sets it aside."
        )


def _refuse_log_file(path: Path, source: str) -> None:
    """Raise ConfigError for a file that does not hold metrics of a run, or that cannot be written."""
    refuse_checkpoint(path, f"{source}: log_file: ")
    if is_foreign(path):
        raise ConfigError(f"{source}: log_file: {path} does not hold metrics of a run. Name another file.")
    place = next((each for each in (path, *path.parents) if each.exists()), path)
    if not os.access(place, os.W_OK) or not (place == path or place.is_dir()):
        raise ConfigError(f"{source}: log_file: {place} cannot be written to. Name another file.")


def set_aside(loaded: LoadedConfig, resumed: Resumed | None, notice: Notice) -> None:
    """Set aside earlier work in the run's places, except what it resumes from. Cut its metrics after that step."""
    config, places = loaded.config, places_of(loaded, resumed)
    step = resumed.step if resumed is not None and places.owns_checkpoints else -1
    why = f"the run resumes from step {step:,}" if places.owns_checkpoints else "a new run starts"
    moved: list[Path] = []
    try:
        # Before the metrics are cut: if the run is killed in between, they reach past the newest checkpoint, which the
        # next resume mends. They must never end before it.
        moved += checkpoint.set_aside(places.checkpoints, after=step)
        if not places.owns_metrics and has_steps(places.metrics):
            moved.append(checkpoint.rename_aside(places.metrics))
        if not places.owns_output:
            moved += set_aside_outputs(places.output, read=[Path(config.model)])
        moved += map(checkpoint.rename_aside, _users_files(places.output))
    except OSError as error:
        raise ConfigError(
            f"output_dir: cannot set aside {error.filename or places.output}: {error.strerror}."
        ) from None
    for path in moved:
        notice(f"{path.name}: set aside, because {why}")
    if resumed:
        evaluated = any(at == resumed.step for at, *_ in resumed.manifest.position.get("evaluations", ()))
        sampled = resumed.manifest.position.get("sampled") == resumed.step
        cut_metrics(places.metrics, resumed.step, evaluated=evaluated, sampled=sampled)


def _users_files(output: Path) -> dict[Path, str]:
    """Return the files that a run writes at its start and that no run has written: {path: what would replace it}."""
    written = {RUN_FILE: (HEADER, "the resolved config"), PLAN_FILE: (_PLAN_START, "the plan of the run")}
    files = ((output / name, start, what) for name, (start, what) in written.items())
    return {path: what for path, start, what in files if path.is_file() and not _begins(path, start)}


def _begins(path: Path, start: str) -> bool:
    with path.open("rb") as file:
        return file.read(len(start)) == start.encode()
