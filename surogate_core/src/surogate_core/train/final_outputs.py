"""Writes the outputs of a run after its last step: the model or the adapter, and checks that they load."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from ..checkpoint import folders as checkpoint
from ..checkpoint import hf
from ..checkpoint.adapter import ADAPTER_FOLDER, MERGED_FOLDER, open_merge, write_adapter
from ..checkpoint.progress import Progress
from ..errors import RunStopped
from ..machine.timing import mark
from ..outputs.check import OutputCheck
from ..planning.plan import Plan
from ..planning.run import Run
from ..reporting.picture import import_ahead

if TYPE_CHECKING:
    from torch import Tensor

    from ..runtime.team import Team
    from ..runtime.worker import Worker

SHORT_RUN_SECONDS = 60
"""A run that is planned to be shorter starts the process that checks its outputs before its steps, a longer one
after them."""


def refuse_nonfinite_weights(weights: Iterable[Tensor], step: int, checkpoints: Path) -> None:
    """Raise RunStopped for weights with NaN or inf, so that they never replace a good checkpoint.

    An update can overflow although its gradient was finite.
    """
    from ..runtime.finite_check import all_finite

    if all_finite(weights):
        return
    complete = checkpoint.list_checkpoints(checkpoints)
    raise RunStopped(
        f"step {step}: the weights hold NaN or inf: an update overflowed. They are not saved; "
        + (f"the newest complete checkpoint is {complete[-1]}. " if complete else "no checkpoint is complete yet. ")
        + "Lower learning_rate or weight_decay."
    )


def _is_checked(run: Run) -> bool:
    return run.config.verify_outputs and run.model.in_transformers


def start_output_check(run: Run, seconds: float, check: OutputCheck) -> None:
    """Let the output check import its libraries during a short run. During a long one it would only hold memory."""
    if _is_checked(run) and seconds < SHORT_RUN_SECONDS:
        check.prepare(run)
    else:
        check.end()


def write_outputs(run: Run, plan: Plan, worker: Worker | Team, progress: Progress, check: OutputCheck) -> None:
    """Write the trained model, or the adapter and, if asked for, the merged model. `check` then loads each of them."""
    from ..checkpoint.saved_run import model_export

    if _is_checked(run):
        check.prepare(run)
    config, assembly = run.config, plan.assembly
    output = Path(config.output_dir)
    worker.settle()
    params = worker.params()
    refuse_nonfinite_weights(params.values(), progress.step, Path(config.resolved_checkpoint_dir))
    if run.adapter is None:
        hf.save_model(output, model_export(run, plan, params))
    else:
        adapter, _ = run.adapter
        folder = output / ADAPTER_FOLDER
        checkpoints = Path(config.resolved_checkpoint_dir)
        hf.save_files(
            folder,
            lambda fresh: write_adapter(fresh, run, assembly, params),
            adapter.config_file,
            safe_in=checkpoints,
        )
        if config.merge_adapter:
            open_merge(adapter, folder, config.model).write(output / MERGED_FOLDER)
    mark("outputs written")
    if _is_checked(run):
        import_ahead()
        check.finish(run)
        mark("outputs loaded once")
