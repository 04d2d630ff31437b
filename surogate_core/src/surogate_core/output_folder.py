"""The folders of a run before its first step: made, cleared of what a killed save has left, no two runs in one."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from . import checkpoint
from .adapted import MERGED_FOLDER
from .config import LoadedConfig, dump_yaml, resolved
from .errors import ConfigError
from .metrics import METRICS_FILE, cut_metrics
from .prepare import Prepared
from .resume import Resumed, is_of
from .versions import library_versions

Notice = Callable[[str], None]


def records_file(loaded: LoadedConfig) -> Path:
    """Where the run's metrics go."""
    config = loaded.config
    return Path(config.output_dir) / METRICS_FILE if config.log_file is None else Path(config.log_file)


def refuse_to_overwrite(prepared: Prepared) -> None:
    """Raise ConfigError where an output would replace the model that is trained."""
    config = prepared.loaded.config
    output = Path(config.output_dir)
    if config.merge_adapter and config.adapter is not None:
        output = output / MERGED_FOLDER
    if output.exists() and output.samefile(prepared.model_dir):
        raise ConfigError(
            f"{prepared.loaded.source}: output_dir: {output} is the directory of the model that is trained; its "
            "weights would be replaced. Name another directory."
        )


def open_output(loaded: LoadedConfig, notice: Notice) -> None:
    """Make the folders, clear what a killed save has left, and write run.yaml: the resolved config and versions."""
    config = loaded.config
    output, checkpoints = Path(config.output_dir), Path(config.resolved_checkpoint_dir)
    try:
        output.mkdir(parents=True, exist_ok=True)
        checkpoints.mkdir(parents=True, exist_ok=True)
        header = "".join(f"# {name} {version}\n" for name, version in library_versions().items())
        (output / "run.yaml").write_text(header + dump_yaml(resolved(loaded)), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"output_dir: cannot write to {error.filename or output}: {error.strerror}.") from None
    for leftover in {*checkpoint.remove_leftovers(checkpoints), *checkpoint.remove_leftovers(output)}:
        notice(f"removed {leftover.name}, left by a save that was killed")


def set_aside(loaded: LoadedConfig, resumed: Resumed | None, notice: Notice) -> None:
    """Leave of an earlier run what this one goes on from, and rename the rest."""
    checkpoints, records = Path(loaded.config.resolved_checkpoint_dir), records_file(loaded)
    here = resumed if is_of(resumed, checkpoints) else None
    why = f"the run goes on from step {here.step:,}" if here else "a new run begins"
    # Before the records are cut: killed in between, they reach beyond the newest checkpoint, never the reverse.
    moved = checkpoint.set_aside(checkpoints, after=here.step if here else -1)
    if loaded.config.overwrite_output_dir and here is None and records.is_file():
        moved.append(checkpoint.aside(records))
    for path in moved:
        notice(f"{path.name}: set aside, since {why}")
    if resumed:
        cut_metrics(records, resumed.step)
