"""The optimizer steps of a run: how many, and the batches and the learning rate of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from surogate_core.api import World

from ..data.corpora import Corpora, load_corpora
from ..data.loader import Loader
from ..data.saved_tokens import SavedTokens
from ..runs.run import Run, asked_by
from .schedule import Schedule


@dataclass(frozen=True, kw_only=True)
class Steps:
    """The optimizer steps of a run; `total` of them."""

    data: Corpora
    loader: Loader
    schedule: Schedule
    total: int


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
    total = config.max_steps if config.max_steps > 0 else config.num_epochs * loader.steps_per_epoch
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
    return Steps(data=data, loader=loader, schedule=schedule, total=total)
