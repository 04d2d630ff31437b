"""The weights of a profile: those that the run starts from, or random ones. The profile never changes them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from .. import run
from ..assembly.assembly import Assembly
from ..planning.run import Run

if TYPE_CHECKING:
    from ..runtime.worker import Worker

ADAPTER_STD = 0.01
STAGED_STD = 0.02


def fill(opened: Run, assembly: Assembly, worker: Worker, *, random: bool) -> None:
    """Fill params and states. With `random`, draw all params and read no checkpoint.

    Adapter matrices that start at zero are drawn: they are zero in a run's first step only, and a GPU multiplies zeros
    faster than other numbers, because it needs less power.
    """
    from ..runtime.initialise import draw_zeros, initialise

    config = opened.config
    view = worker.buffers.persistent
    if random:
        initialise((v for v in assembly.allocated if v.init), view, config.train_seed)
        for part in assembly.staging:
            for view_of_staged in worker.staged(part).values():
                view_of_staged.normal_(std=STAGED_STD)  # on the device, because a host takes minutes for 70B
            worker.derive(part)
    else:
        run.fill_weights(opened, assembly, worker)
    if opened.adapter is not None and config.adapter_path is None:
        draw_zeros(assembly.trainable, view, ADAPTER_STD, config.train_seed)
