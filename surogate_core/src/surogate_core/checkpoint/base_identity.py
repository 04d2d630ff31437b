"""Identity of the base that an adapter is trained on: a checkpoint of an adapter does not hold its weights."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from xxhash import xxh3_128

from ..hub.config_json import QUANTIZATION
from ..planning.plan import Plan
from ..planning.run import Run
from .resume import FILES, FROZEN, WEIGHTS
from .saved_tensors import read_header
from .stored_weights import locate

_PIECES = 4
_PIECE_BYTES = 256


def base_facts(run: Run, plan: Plan) -> dict[str, str]:
    """Return the facts of a run's base; none for a run that trains all weights, or draws them."""
    if run.adapter is None or run.config.from_scratch:
        return {}
    stored = run.model_config.get(QUANTIZATION)
    return {
        WEIGHTS: weights_identity(run.model_dir),
        FILES: "floating point" if stored is None else str(stored.get("quant_method")),
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
