"""A run between two steps, as a callback of a script has it in hand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from numbers import Real
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, SupportsFloat

from surogate_core.api import CallbackReport, EvalReport, SampleReport
from surogate_core.assembly.assembly import metrics_of
from surogate_core.errors import ConfigError

from ..checkpoints import folders as checkpoint
from ..generation.prompts import Prompt
from .evaluation import measure
from .interrupt import STOPPED
from .job import Job

if TYPE_CHECKING:
    from torch import Tensor

    from .callback_tools import Tools

LONGEST_NAME = 100


class RunCut(BaseException):
    """A signal came while a callback had the run: the callback ends, and the run is saved."""


class ActiveRun:
    """A run in the hand of a callback, until the callback returns. The step before has finished and is reported.

    Nothing here changes the bits of the steps that follow. After a signal a method ends the callback, as the run ends.
    """

    def __init__(self, job: Job, tools: Tools, name: str) -> None:
        """name: of the callback."""
        self._job: Job | None = job
        self._tools, self._name = tools, name

    def _leave(self) -> None:
        """Take the run out of the hand of a callback that has returned."""
        self._job = None

    def _run(self) -> Job:
        if self._job is None:
            raise ConfigError(
                f"callback {self._name}: has returned, and with it the run is out of its hand. Use the run "
                "before it returns."
            )
        if self._job.interrupt.requested is not None:
            raise RunCut
        return self._job

    @property
    def step(self) -> int:
        """Optimizer steps that have finished."""
        return self._run().progress.step

    @property
    def total_steps(self) -> int:
        return self._run().total_steps

    @property
    def tokens(self) -> int:
        """Tokens of all finished steps, without padding."""
        return self._run().progress.tokens

    @property
    def loss(self) -> float:
        """The loss of the last step (`StepReport.loss`)."""
        loss = self._run().progress.loss
        assert loss is not None, "a callback is called after a step"
        return loss

    @property
    def output_dir(self) -> Path:
        return self._tools.output

    def stop(self, why: str = "") -> None:
        """Finish the run here: it is saved, evaluated, and its outputs are written. why: `Result.stop_reason`."""
        self._run().interrupt.stop(f"callback {self._name}: {why or STOPPED}")

    def save(self) -> Path:
        """Save a checkpoint now, wait until it is complete, and return its folder.

        `save_total_limit` counts it as any other, and so may remove it later. Raises RunStopped if the disk is full.
        """
        job = self._run()
        job.save()
        job.wait_for_saves()
        return checkpoint.step_folder(self._tools.checkpoints, job.progress.launched)

    def evaluate(self) -> EvalReport:
        """Evaluate the weights as they are, and return the mean loss over the validation set and its metrics.

        It is no evaluation of the run: schedules, the best one and early stopping do not see it, and it is not
        recorded. `log` what should be. Raises ConfigError if no row is held out.
        """
        job = self._run()
        report, figures, cut = measure(job)
        if report is not None:
            return replace(report, metrics=metrics_of(job.reported, figures))
        if cut:
            raise RunCut
        raise ConfigError("evaluate: no row is held out. Set validation_datasets, or a validation_split_ratio above 0")

    def generate(self, prompts: Sequence[str]) -> list[SampleReport]:
        """Return what the weights as they are answer to texts, one for each, with `.text` and `.finish`.

        The keys `sample_max_new_tokens`, `sample_temperature`, `sample_top_p` and `sample_as` say how. It is computed
        in another process: where the samples of the run are (`sample_on`) if it has `sample_prompts`, else on the host,
        which then holds a second copy of the model that is not planned. Raises ConfigError for a prompt that is empty
        or does not fit into a row, and for a run that can have no `sample_prompts`, such as of a reward model.
        """
        job = self._run()
        if isinstance(prompts, str) or not prompts or not all(isinstance(p, str) and p.strip() for p in prompts):
            raise ConfigError("generate: takes a list of texts that are not empty")
        named = [Prompt(text, where=f"prompt {number}") for number, text in enumerate(prompts, 1)]
        samples = self._tools.samples()
        self._settle(job)
        found = samples.take(job.progress.step, named)
        if found is None and job.interrupt.requested is None:
            raise ConfigError("generate: the run is stopped already. Generate first")
        if found is None:
            raise RunCut
        return found

    def weights(self) -> dict[str, Tensor]:
        """Return copies of the weights as they are, whole, on the host, by the names that files of outputs have.

        Of a run with an adapter they are those of the adapter, as PEFT names them; else those of the model, in
        `model_dtype`.
        """
        from safetensors.torch import load_file

        job = self._run()
        self._settle(job)
        output, safe_in = self._tools.output, self._tools.checkpoints
        with (
            checkpoint.stopping_when_disk_refuses(output, safe_in=safe_in),
            TemporaryDirectory(dir=output, prefix=checkpoint.SAVING) as name,
        ):
            self._tools.write(Path(name))
            files = sorted(Path(name).glob("*.safetensors"))
            return {name: tensor.clone() for file in files for name, tensor in load_file(file).items()}

    @staticmethod
    def _settle(job: Job) -> None:
        job.worker.gather()
        job.worker.settle()

    def log(self, **metrics: SupportsFloat) -> None:
        """Report figures by name: to `metrics.jsonl` (`"log": "callback"`), the console and the trackers.

        A tracker has them as `callback/NAME`. Numbers, and arrays or tensors of one. Raises ConfigError for all else.
        """
        job, values = self._run(), {name: _number(name, value) for name, value in metrics.items()}
        if not values:
            raise ConfigError("log: takes figures by name, such as log(accuracy=0.5)")
        report = CallbackReport(step=job.progress.step, metrics=values, time=time.time())
        job.report(lambda: report)


def _number(name: str, value: Any) -> float:
    """Return a figure as a float; NaN and inf are figures too. Raises ConfigError for another."""
    if not name.isprintable() or len(name) > LONGEST_NAME:
        raise ConfigError(f"log: {name[:LONGEST_NAME]!r} is no name of a figure. Use a short word")
    single = value.item() if hasattr(value, "item") and getattr(value, "ndim", 0) == 0 else value
    if not isinstance(single, Real):
        raise ConfigError(f"log: {name}: is {type(value).__name__}, not one number. Give a float")
    return float(single)
