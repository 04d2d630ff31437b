"""`reference_model`: the weights of another model of the same sizes, as the frozen reference of a run."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from surogate_core.assembly.assembly import Assembly
from surogate_core.errors import ConfigError
from surogate_core.runtime.finite_check import refuse_nonfinite_weights
from surogate_core.runtime.pieces import Pieces

from ..hub.files import CONFIG_FILES, WEIGHT_FILES, resolve_model_dir
from ..runs.run import Run, open_run
from .base import open_base, weights_identity
from .stored_weights import file_of

if TYPE_CHECKING:
    from surogate_core.runtime.team import AnyWorker

_COPY = "reference."
"""Start of the names of the states that hold a frozen reference."""


def reference_identity(run: Run) -> str:
    """Return a hash of the weights of `reference_model`, by which a resumed run knows them."""
    assert run.config.reference_model is not None
    files = (*CONFIG_FILES, *WEIGHT_FILES)
    return weights_identity(resolve_model_dir(run.config.reference_model, files, where="reference_model"))


def fill_reference_model(run: Run, assembly: Assembly, worker: AnyWorker) -> None:
    """Load the weights of `reference_model` into the states of the reference.

    Raises ConfigError, naming both, if it is not of the sizes of the run's model, and as `load_base` does.
    """
    name = run.config.reference_model
    assert name is not None
    files = (*CONFIG_FILES, *WEIGHT_FILES)
    folder = resolve_model_dir(name, files, where="reference_model")
    config = run.config.model_copy(update={"model": str(folder), "from_scratch": False})
    other = open_run(replace(run.loaded, config=config), run.registry, files)
    if (other.model.name, other.dims) != (run.model.name, run.dims):
        raise ConfigError(
            f"reference_model: {name} is {other.model.name} of other sizes than the {run.model.name} that is trained. "
            "Use a model of the same config.json."
        )
    views = {
        value.name.removeprefix(_COPY): worker.buffers.persistent(value)
        for value in assembly.declared
        if value.role == "state" and value.name.startswith(_COPY)
    }
    weights = open_base(other, assembly.weights)
    weights.load({param: Pieces.of(view) for param, view in views.items()})
    refuse_nonfinite_weights(views, [m for m in weights.maps if m.param in views], folder, file_of)
