"""The weights of a run's model in its files: loads them, and tells bases apart.

A checkpoint of an adapter does not hold the weights of its base.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from xxhash import xxh3_128

from surogate_core.api import WeightMap
from surogate_core.assembly.assembly import Assembly
from surogate_core.planning.plan import Plan
from surogate_core.runtime.finite_check import refuse_nonfinite_weights
from surogate_core.runtime.pieces import Pieces

from ..hub.config_json import QUANTIZATION
from ..runs.run import Run
from ..runs.unstored import remedies
from .base_files import kept_names, maps_in_files, stored_names
from .checked_form import CheckedForm
from .facts import FILES, FROZEN, UNQUANTIZED, WEIGHTS
from .quantized_base import BaseFormat, quantized_params
from .saved_tensors import read_header
from .stored_weights import StoredWeights, file_of, locate, open_weights

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from surogate_core.runtime.team import AnyWorker


def load_base(run: Run, assembly: Assembly, worker: AnyWorker, ignored: Sequence[str] = ()) -> None:
    """Copy the weights into the worker's params. Staged ones are loaded block by block, each followed by `derive`.

    `ignored`: tensors that the files may hold besides those that the model ignores.

    Raises ConfigError, naming file and tensor, for files that do not fit the model, or with NaN or inf in weights that
    are staged or stored quantized.
    """
    base, filled = _base_format(run, assembly), dict[str, int]()
    weights = open_base(run, assembly.weights, ignored, base)
    weights.load({name: Pieces.of(view) for name, view in worker.params().items()})
    for part in assembly.staging:
        views = {name: view for name, view in worker.staged(part).items() if name not in weights.quantized}
        if part.row is None:
            weights.load({name: Pieces.of(view) for name, view in views.items()})
        else:
            shapes = {param.name: param.stored_shape for param in part.places}
            weights.load({name: Pieces.of_rows(shapes[name], part.row, view) for name, view in views.items()})
        found = [m for m in weights.maps if m.param in views]
        refuse_nonfinite_weights(views, found, run.model_dir, file_of, part.row or 0)
        if part.makes(weights.quantized):
            worker.derive(part)
        if states := weights.load_quantized(worker.staged_states(part)):
            worker.divide(part, states)
        filled |= states
    _check_filled(assembly, base, {**filled, **weights.load_quantized(worker.stored())})


def open_base(
    run: Run, maps: Sequence[WeightMap], ignored: Sequence[str] = (), base: BaseFormat | None = None
) -> StoredWeights:
    """Return the weights of `maps` in the run's base, whose maps have the names of its files. New ones may be missing.

    Raises ConfigError as `open_weights` does.
    """
    model, dims, names = run.model, run.dims, stored_names(run, maps)
    kept_names(run, names)  # files without a tower are of another class, whose tensors have other names too
    other = [*model.ignored_tensors(dims), *model.kept_tensors(dims), *ignored]
    copies = {names.of(copy): names.of(original) for copy, original in model.tied_copies(dims).items()}
    named = names.maps(maps)
    if any(m.new for m in named):
        held = {name for found in locate(run.model_dir).values() for name in found}
        named = tuple(m for m in named if not m.new or any(tensor.name in held for tensor in m.tensors))
    return open_weights(run.model_dir, named, list(map(names.of, other)), copies, base, run.form)


def stored_params(run: Run, assembly: Assembly) -> frozenset[str]:
    """Return the params that the model's files hold in the run's weight format. Raises like `load_base`."""
    base = _base_format(run, assembly)
    return frozenset() if base is None else quantized_params(locate(run.model_dir), maps_in_files(run, assembly), base)


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
    weights = [weight for weight in maps_in_files(run, assembly) if weight.param in params]
    refuse_nonfinite_weights(params, weights, run.model_dir, file_of)


_PIECES = 4
_PIECE_BYTES = 256


def base_facts(run: Run, plan: Plan) -> dict[str, str]:
    """Return the facts of a run's base; none for a run that trains all weights, or draws them."""
    if run.adapter is None or run.config.from_scratch:
        return {}
    stored = run.form[1] if run.form else run.model_config.get(QUANTIZATION)
    return {
        WEIGHTS: weights_identity(run.model_dir),
        FILES: UNQUANTIZED if stored is None else str(stored.get("quant_method")),
        FROZEN: plan.inputs.precision.model if run.weight_format is None else run.weight_format[0].name,
    }


def weights_identity(model_dir: Path) -> str:
    """Return a hash of the names, dtypes and shapes of a checkpoint's tensors, and of a sample of each one's bytes.

    It depends neither on the folder nor on how the tensors are spread over files. It reads 1 KiB of a tensor.
    """
    tensors: dict[str, bytes] = {}
    for path, names in locate(model_dir).items():
        tensors |= {name: sample for name, sample in _samples(path) if name in names}
    digest = xxh3_128()
    for name in sorted(tensors):
        digest.update(tensors[name])
    return digest.hexdigest()[:16]


def _samples(path: Path) -> Iterator[tuple[str, bytes]]:
    """Yield (name, its header and sample) for the tensors of a file."""
    header, begin = read_header(path)
    with path.open("rb", buffering=0) as file:
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            first, end = entry["data_offsets"]
            sample = bytearray(f"{name} {entry['dtype']} {entry['shape']}\n".encode())
            last = max(end - first - _PIECE_BYTES, 0)
            for offset in sorted({last * i // (_PIECES - 1) for i in range(_PIECES)}):
                file.seek(begin + first + offset)
                sample += file.read(min(_PIECE_BYTES, end - first - offset))
            yield name, bytes(sample)
