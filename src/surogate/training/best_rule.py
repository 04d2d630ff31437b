"""The rule by which one evaluation of a run is the best, and the run ends when none is better for long."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import nan
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate_core.errors import ConfigError, RunStopped

from ..checkpoints.best import Best
from ..checkpoints.folders import step_folder
from ..checkpoints.manifest import DamagedCheckpoint, read_manifest
from ..config.schema import TrainConfig
from ..reporting.text import counted

if TYPE_CHECKING:
    from surogate_core.assembly.assembly import Reported

    from ..checkpoints.progress import Progress

LOSS = "loss"


@dataclass(frozen=True)
class BestRule:
    """The wishes of a run about its evaluations.

    saves      each best one saves a checkpoint
    loads      the outputs have the weights of the best one
    patience   end the run after so many in a row that are not better by more than `threshold`; None: never
    """

    metric: str
    greatest: bool
    saves: bool = False
    loads: bool = False
    patience: int | None = None
    threshold: float = 0.0

    @classmethod
    def of(cls, config: TrainConfig) -> BestRule | None:
        """Return the rule of a run; None if it does not look for its best evaluation."""
        if not config.looks_for_best:
            return None
        loads = bool(config.load_best_model_at_end)
        return cls(
            metric=config.best_metric,
            greatest=config.greatest_is_best,
            saves=loads or config.save_strategy == "best",
            loads=loads,
            patience=config.early_stopping_patience,
            threshold=config.early_stopping_threshold,
        )

    def goes_on(self, saved: Best) -> bool:
        """Return whether a saved best is one by this rule."""
        return (saved.metric, saved.greatest) == (self.metric, self.greatest)

    def begun(self, saved: Best | None, notice: Callable[[str], None], step: int = 0) -> Best:
        """Return what a run begins from, of what the checkpoint of `step` has saved."""
        if saved is not None and self.goes_on(saved):
            return saved
        if step:
            before = "did not look for one" if saved is None else f"looked for the {saved.order} {saved.metric}"
            notice(f"the best evaluation is looked for from step {step:,} on: before, the run {before}")
        return Best(self.metric, self.greatest)

    def after(self, best: Best, step: int, loss: float, reported: Sequence[Reported], figures: Sequence[Any]) -> Best:
        """Return the best after an evaluation. figures: of `reported` after the loss. PluginError: see `metrics_of`."""
        value: float | None = loss
        if self.metric != LOSS:
            value = next(f.of(v) for f, v in zip(reported[1:], figures, strict=True) if f.name == self.metric)
        return best.after(step, nan if value is None else float(value), self.threshold)

    def refuse_none(self, best: Best | None) -> None:
        """Raise RunStopped if the outputs should have the weights of the best evaluation, and none was finite."""
        if self.loads and (best is None or not best.step):
            raise RunStopped(
                f"load_best_model_at_end: the outputs are not written: no evaluation had a finite {self.metric}, so "
                "none is the best. The last weights are saved as a checkpoint. Lower learning_rate, or check the data."
            )

    def ends(self, best: Best | None) -> bool:
        """Return whether the run has waited long enough."""
        return self.patience is not None and best is not None and best.waited >= self.patience

    def why(self, best: Best) -> str:
        """Return why a run ends that `ends`."""
        by = f" by more than {self.threshold:g}" if self.threshold else ""
        waited = f"{counted(best.waited, 'evaluation')} in a row"
        return f"early stopping: {self.metric} has not improved{by} in {waited} ({_found(best)})"

    def __str__(self) -> str:
        order = Best(self.metric, self.greatest).order
        text = f"best evaluation: the {order} {self.metric}"
        text += ", whose weights become the outputs" if self.loads else ""
        if self.patience is not None:
            by = f" by more than {self.threshold:g}" if self.threshold else ""
            count = f"{counted(self.patience, 'evaluation')} in a row"
            text += f"; the run ends after {count} without an improvement{by}"
        return text


def _found(best: Best) -> str:
    return f"best: {best}, after step {best.step:,}" if best.step else "none was finite"


def output_checkpoint(config: TrainConfig, progress: Progress) -> Path | None:
    """Return the checkpoint whose weights the outputs have; None: they have those of the last step."""
    step = progress.weights_step(bool(config.load_best_model_at_end))
    return None if step == progress.step else best_checkpoint(config, progress.best)


def best_checkpoint(config: TrainConfig, best: Best | None) -> Path | None:
    """Return the folder of the best checkpoint, whether or not it exists."""
    if best is None or not best.step:
        return None
    return step_folder(Path(best.folder or config.resolved_checkpoint_dir), best.step)


def refuse_lost_best(config: TrainConfig, source: str, best: Best | None) -> None:
    """Raise ConfigError if a resumed run is to write the weights of a best checkpoint that is gone."""
    rule, folder = BestRule.of(config), best_checkpoint(config, best)
    if rule is None or not rule.loads or best is None or folder is None or not rule.goes_on(best):
        return
    try:
        read_manifest(folder)
    except DamagedCheckpoint as damage:
        raise ConfigError(
            f"{source}: load_best_model_at_end: the best checkpoint of the run, {folder} ({best}), is gone or damaged "
            f"({damage}). Restore it, or set load_best_model_at_end: false."
        ) from None
