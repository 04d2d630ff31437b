"""The calls of callbacks that have the run in hand: duties between its steps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from surogate_core.errors import PluginError, RunStopped
from surogate_core.train import Duty, Progress

from .active_run import ActiveRun, RunCut
from .callback_tools import Tools
from .callbacks import Callback, name_of, naming, stops
from .job import Job

if TYPE_CHECKING:
    from surogate_core.runtime.team import AnyWorker


@dataclass(frozen=True)
class Call(Duty):
    """Calls a callback. If it stops the run, those behind it are called too; after a signal they are not."""

    job: Job
    callback: Callback
    tools: Tools

    def due(self, progress: Progress) -> bool:
        try:
            with naming(self.callback, progress.launched):
                return stops(self.callback.due(progress.launched))
        except RunStopped as error:
            self.job.stop_for(error)
            raise

    def __call__(self, worker: AnyWorker, progress: Progress) -> bool:
        run = ActiveRun(self.job, self.tools, name_of(self.callback))
        try:
            with naming(self.callback, progress.step):
                if stops(self.callback(run)):
                    run.stop()
        except RunCut:
            return True
        except (RunStopped, PluginError) as error:
            self.job.stop_for(error)
        finally:
            run._leave()
        return self.job.interrupt.requested is not None
