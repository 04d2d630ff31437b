"""Keys on when a run evaluates and saves, which evaluation is the best, and what follows from that."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from .values import Flag, Int, Keys, Number, StepsOrPart, Strategy, Text


class EvaluationKeys(Keys):
    """Evaluations and checkpoints"""

    eval_strategy: Annotated[Literal["steps", "epoch", "no"], Strategy] = Field(
        "steps",
        description="When a run with a validation set evaluates, besides after its last step. steps: every "
        "`eval_steps`; epoch: at the end of each epoch; no: never.",
    )
    eval_steps: StepsOrPart = Field(
        100,
        description="Evaluate every N steps, or, below 1, every such part of the run's steps; 0: never between steps.",
    )
    evals_per_epoch: Annotated[Int, Field(ge=1)] | None = Field(
        None, description="Evaluate N times in each epoch, at equal distances, instead of every `eval_steps`."
    )
    eval_delay: Number = Field(
        0.0,
        ge=0,
        description="No evaluation between steps is earlier than after N steps, or, where `eval_strategy` is epoch or "
        "`evals_per_epoch` is set, N epochs, which may be a part of one.",
    )
    eval_on_start: Flag = Field(
        False, description="Evaluate before the first step too. This is never the best evaluation."
    )
    eval_samples: Int = Field(
        512,
        ge=0,
        description="Rows of `sequence_len` tokens that an evaluation reads, the same random ones each time; 0: all.",
    )
    save_strategy: Annotated[Literal["steps", "epoch", "best", "no"], Strategy] = Field(
        "steps",
        description="When checkpoints are saved. steps: every `save_steps`; epoch: at the end of each epoch; best: "
        "after each evaluation that is the best so far; no: none between steps. An interrupted run is always saved.",
    )
    save_steps: StepsOrPart = Field(
        50,
        description="Save a checkpoint every N steps, or, below 1, every such part of the run's steps; 0: none between "
        "steps.",
    )
    saves_per_epoch: Annotated[Int, Field(ge=1)] | None = Field(
        None, description="Save N checkpoints in each epoch, at equal distances, instead of every `save_steps`."
    )
    save_total_limit: Int = Field(
        5,
        ge=0,
        description="Keep only N checkpoints, the newest; 0: all. The best one of a run that looks for it is among "
        "them, however old it is, and beside the newest if N is 1.",
    )
    save_keep_every: Int = Field(
        0,
        ge=0,
        description="Also save a checkpoint every N steps that is kept for ever, and not counted by "
        "`save_total_limit`; 0: none.",
    )
    save_in_background: Flag = Field(
        True,
        description="Copy the state to host memory at `save_steps` and write the checkpoint while training continues. "
        "If the copies do not fit, or with false, training waits for the write.",
    )
    load_best_model_at_end: Flag | None = Field(
        None,
        description="Write the weights of the best evaluation as the outputs, not the last ones. Each evaluation that "
        "is the best so far saves a checkpoint. null: true with `early_stopping_patience`.",
    )
    metric_for_best_model: Text | None = Field(
        None,
        description="What says which evaluation is the best: loss, or a metric that the evaluations report. `eval_` in "
        "front of it is ignored. null: loss.",
    )
    greater_is_better: Flag | None = Field(
        None,
        description="Whether the best evaluation has the greatest value of `metric_for_best_model`, or the least. "
        "null: the least of a metric whose name ends in loss, else the greatest.",
    )
    early_stopping_patience: Annotated[Int, Field(ge=1)] | None = Field(
        None,
        description="End the run after N evaluations in a row that are not better than the best before them by more "
        "than `early_stopping_threshold`; null: train all steps.",
    )
    early_stopping_threshold: Number = Field(
        0.0, ge=0, description="What an evaluation must be better by, for `early_stopping_patience`."
    )

    @property
    def evaluates_between_steps(self) -> bool:
        """Whether a run with a validation set evaluates between steps."""
        return self.eval_strategy != "no" and bool(self.eval_steps or self.evals_per_epoch)

    @property
    def counts_epochs(self) -> bool:
        """Whether evaluations are placed in epochs, and `eval_delay` is a number of them."""
        return self.eval_strategy == "epoch" or self.evals_per_epoch is not None

    @property
    def looks_for_best(self) -> bool:
        """Whether the run keeps track of its best evaluation."""
        wanted = self.load_best_model_at_end or self.early_stopping_patience or self.metric_for_best_model
        return bool(wanted) or self.save_strategy == "best"

    @property
    def best_metric(self) -> str:
        """The metric of the best evaluation, as evaluations report it."""
        return (self.metric_for_best_model or "loss").removeprefix("eval_")

    @property
    def greatest_is_best(self) -> bool:
        given = self.greater_is_better
        return not self.best_metric.endswith("loss") if given is None else given
