"""The optimizer steps of a run: how many, the batches and the learning rate of each, and what is due after which."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from surogate_core.api import World
from surogate_core.errors import ConfigError

from ..config.schema import TrainConfig
from ..data.corpora import Corpora, load_corpora
from ..data.loader import Loader
from ..data.saved_tokens import SavedTokens
from ..reporting.text import counted
from ..runs.run import Run, asked_by
from .cadence import Cadence, cadence_of, evaluations_of
from .schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The optimizer steps of a run; `total` of them.

    evaluations  between steps; those after the last step, and of a run without a validation set, are not among them
    saves        of checkpoints
    kept         of those that are never deleted
    """

    data: Corpora
    loader: Loader
    schedule: Schedule
    total: int
    evaluations: Cadence
    saves: Cadence
    kept: Cadence

    @property
    def evaluated(self) -> Sequence[int]:
        """The steps after which the run evaluates, the last among them; none without a validation set."""
        return replace(self.evaluations.within(self.total), last=(self.total,)) if self.data.validation else ()


def load_steps(
    run: Run,
    world: World,
    notice: Callable[[str], None],
    moved: Callable[[str], None],
    saved: SavedTokens | None = None,
) -> Steps:
    """Tokenise and pack the run's data and derive its steps; batches are those of the ranks of this process.

    `moved` is called with what is being tokenised, again and again. `saved`: the tokens that are trained in
    place of the present ones.
    """
    config, formats = run.config, run.registry.dataset_formats()
    asked = asked_by(run.loaded, run.registry)
    data = load_corpora(config, formats, run.model_dir, run.dims.vocab_size, notice, moved, asked, saved)
    loader = Loader(
        data.train,
        config.per_device_train_batch_size,
        config.gradient_accumulation_steps * world.size,
        config.train_seed,
        data.tokenizer.padding_id,
        ranks=world.ranks,
        world_size=world.size,
    )
    epoch = loader.steps_per_epoch
    total = config.max_steps if config.max_steps > 0 else math.ceil(round(config.num_epochs * epoch, 6))
    evaluations = evaluations_of(config, total, epoch)
    _refuse_without_evaluations(config, data, evaluations, total)
    schedule = Schedule.build(
        config.lr_scheduler_type,
        config.learning_rate,
        total,
        warmup_steps=config.warmup_steps,
        warmup_ratio=config.warmup_ratio,
        cooldown_steps=config.cooldown_steps,
        final_lr_fraction=config.final_lr_fraction,
        wsd_decay_steps_fraction=config.wsd_decay_steps_fraction,
        settings=config.lr_scheduler_kwargs,
    )
    return Steps(
        data=data,
        loader=loader,
        schedule=schedule,
        total=total,
        evaluations=evaluations,
        saves=cadence_of(config, "save", total, epoch),
        kept=Cadence(config.save_keep_every),
    )


def _refuse_without_evaluations(config: TrainConfig, data: Corpora, evaluations: Cadence, total: int) -> None:
    """Raise ConfigError if keys need evaluations that this data, or the number of steps, does not give."""
    chosen = {
        "early_stopping_patience": config.early_stopping_patience is not None,
        "load_best_model_at_end": config.load_best_model_at_end,
        "save_strategy": config.save_strategy == "best",
        "metric_for_best_model": config.metric_for_best_model is not None,
        "eval_delay": bool(config.eval_delay),
    }
    key = next((key for key, is_set in chosen.items() if is_set), "eval_on_start" if config.eval_on_start else "")
    if key and data.validation is None:
        raise ConfigError(
            f"{key}: needs evaluations, but no row is held out. Set validation_datasets, or a larger "
            "validation_split_ratio."
        )
    if key and key != "eval_on_start" and not evaluations.within(total):
        between = f"eval_steps is {config.eval_steps}" if config.eval_strategy == "steps" else "an epoch is longer"
        remedy = "a smaller eval_steps, or evals_per_epoch"
        if replace(evaluations, first=1).within(total):
            between, remedy = f"eval_delay is {config.eval_delay:g}", "a smaller eval_delay"
        raise ConfigError(
            f"{key}: the run has {counted(total, 'step')} and is evaluated after the last one alone "
            f"({between}). Set {remedy}."
        )
