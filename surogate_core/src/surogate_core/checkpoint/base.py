"""Loads the weights of a run's model from its files, at the start of a run and, with an adapter, of a resumed one."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..assembly.assembly import Assembly
from ..hub.config_json import QUANTIZATION
from ..planning.run import Run
from ..planning.unstored import remedies
from ..runtime.finite_check import refuse_nonfinite_weights
from ..runtime.pieces import Pieces
from .checked_form import CheckedForm
from .stored_weights import BaseFormat, file_of, locate, open_weights, quantized_params

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from ..runtime.team import Team
    from ..runtime.worker import Worker


def load_base(run: Run, assembly: Assembly, worker: Worker | Team, ignored: Sequence[str] = ()) -> None:
    """Copy the weights into the worker's params. Staged ones are loaded block by block, each followed by `derive`.

    `ignored`: tensors that the files may hold besides those that the model ignores.

    Raises ConfigError, naming file and tensor, for files that do not fit the model, or with NaN or inf in weights that
    are staged or stored quantized.
    """
    ignored = [*run.model.ignored_tensors(run.dims), *ignored]
    base, filled = _base_format(run, assembly), dict[str, int]()
    weights = open_weights(run.model_dir, assembly.weights, ignored, run.model.tied_copies(run.dims), base)
    weights.load({name: Pieces.of(view) for name, view in worker.params().items()})
    for part in assembly.staging:
        views = {name: view for name, view in worker.staged(part).items() if name not in weights.quantized}
        weights.load({name: Pieces.of(view) for name, view in views.items()})
        refuse_nonfinite(run, assembly, views)
        if part.makes(weights.quantized):
            worker.derive(part)
        if states := weights.load_quantized(worker.staged_states(part)):
            worker.divide(part, states)
        filled |= states
    _check_filled(assembly, base, {**filled, **weights.load_quantized(worker.stored())})


def stored_params(run: Run, assembly: Assembly) -> frozenset[str]:
    """Return the params that the model's files hold in the run's weight format. Raises like `load_base`."""
    base = _base_format(run, assembly)
    return frozenset() if base is None else quantized_params(locate(run.model_dir), assembly.weights, base)


def _check_filled(assembly: Assembly, base: BaseFormat | None, filled: Mapping[str, int]) -> None:
    """Raise the error of the format if a state was neither filled nor is computed by `derive`, which follows."""
    if base is None:
        return
    computed = {value for op in assembly.only("derive").ops for value in op.outs}
    for param, count in filled.items():
        for state in assembly.stored[param][count:]:
            if state not in computed:
                raise base.form.format.failed(
                    "checkpoints.load",
                    f"returned {count} states, but {state.name} is made from the weight itself: return it too",
                )


def _base_format(run: Run, assembly: Assembly) -> BaseFormat | None:
    """Return the weight format that the model's files are stored in."""
    if QUANTIZATION not in run.model_config or run.weight_format is None:
        return None
    format, options = run.weight_format
    if format.checkpoints is None:
        return None
    form = CheckedForm(format, format.checkpoints, options)
    return BaseFormat(form, frozenset(assembly.stored), remedies(run, assembly))


def refuse_nonfinite(run: Run, assembly: Assembly, params: Mapping[str, Tensor]) -> None:
    """Raise ConfigError, naming file and tensor, if those weights of the model that are in `params` hold NaN or inf."""
    weights = [weight for weight in assembly.weights if weight.param in params]
    refuse_nonfinite_weights(params, weights, run.model_dir, file_of)
