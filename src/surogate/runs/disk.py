"""The bytes that a run writes, known before it: its outputs, and each checkpoint. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from fnmatch import fnmatchcase

from surogate_core.dtypes import DTYPES
from surogate_core.planning.plan import Plan
from surogate_core.program.value import Value

from ..hub.stored_bytes import stored_bytes
from .run import Run
from .saved_values import further_values, output_params
from .stored_names import names_among


@dataclass(frozen=True)
class DiskUse:
    """Bytes on disk, without the files of a tokenizer.

    outputs     the model or the adapter
    checkpoint  each one: the same, with what a resumed run needs
    kept        of both, what is copied from the base; None: not known, as the base's weights are not here
    """

    outputs: int
    checkpoint: int
    kept: int | None = 0


def disk_use(run: Run, plan: Plan) -> DiskUse:
    """Return the bytes that a run writes. All ranks together, as each value is written once."""
    assembly, adapter = plan.assembly, run.adapter is not None
    outputs = output_params(assembly, adapter=adapter)
    further = further_values(assembly, plan.inputs.precision.model, adapter=adapter)
    kept = 0 if adapter else _kept(run)
    written, saved = (sum(map(_whole, dict.fromkeys(values))) for values in (outputs, [*outputs, *further]))
    return DiskUse(written + (kept or 0), saved + (kept or 0), kept)


def _whole(value: Value) -> int:
    """Return the bytes of a value on all ranks."""
    return value.nbytes if value.shard is None else DTYPES[value.dtype].nbytes(value.shard.size)


def _kept(run: Run) -> int | None:
    patterns = () if run.config.from_scratch else run.model.kept_tensors(run.dims)
    sizes = stored_bytes(run.model_dir) if patterns else {}
    if sizes is None:
        return None
    names = names_among(sizes, run.model, run.dims, run.model.weights(run.dims))
    stored = [names.of(pattern) for pattern in patterns]
    return sum(size for name, size in sizes.items() if any(fnmatchcase(name, pattern) for pattern in stored))
