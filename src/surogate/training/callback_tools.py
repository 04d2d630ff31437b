"""Tools of callbacks besides the loop of a run: its weights as files, and a process that answers prompts."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import TYPE_CHECKING

from .interrupt import Interrupt
from .run_files import NoFiles, RunFiles

if TYPE_CHECKING:
    from surogate_core.runtime.team import AnyWorker

    from .samples import Samples


@dataclass(frozen=True)
class Tools:
    """Tools of the callbacks of a run.

    write    (empty folder) -> writes the weights as they are, as a model or an adapter
    samples  () -> what answers prompts
    """

    output: Path
    checkpoints: Path
    write: Callable[[Path], object]
    samples: Callable[[], Samples]


def open_tools(
    files: NoFiles, worker: AnyWorker, samples: Samples | None, interrupt: Interrupt, stack: ExitStack
) -> Tools:
    """Return the tools. Without `samples` of the run, what answers prompts starts when it is asked first, on the host.

    `stack` ends it.
    """
    from .samples import open_samples, write_weights

    assert isinstance(files, RunFiles), "only runs of one process have callbacks that use it"
    pieces = partial(files.pieces, worker)

    @cache
    def asked() -> Samples:
        found = open_samples(files.saved_run, files.steps, pieces, "", 1, stack)
        found.sampler.cut = lambda: interrupt.requested is not None
        return found

    write = partial(write_weights, files.saved_run, pieces)
    return Tools(files.output, files.checkpoints, write, (lambda: samples) if samples is not None else asked)
