"""The distance of a merged model from the stored base that its adapter was trained on.

An adapter of QLoRA is trained on rounded matrices and merged into those of the original checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from surogate_core.api import HFTensor, Merge
from surogate_core.assembly.assemble import record
from surogate_core.errors import ConfigError, PluginError
from surogate_core.machine.devices import cpu
from surogate_core.plugins.registry import Registry
from surogate_core.reference.rounding import TORCH_DTYPES

from ..config.load import load_config
from ..hub.config_json import QUANTIZATION
from ..runs.inputs import run_inputs
from ..runs.run import chosen_weight_format, open_run
from .found_run import FoundRun
from .matrix_codec import Matrices, MatrixCodec, matrices_in

ROWS = 64
"""Rows of each matrix that are compared: the references of formats take minutes for all of a large model."""


def _first_rows(tensor: HFTensor, weight: Tensor) -> Tensor:
    """Return rows of the first matrix of a tensor of a checkpoint."""
    if tensor.layout is None:
        return weight[:ROWS]
    return tensor.load(weight[:1] if tensor.leading else weight)[:ROWS]


@dataclass
class StoredBase:
    """The weight format of a base, and what was found of the matrices merged so far: {tensor: relative distance}.

    tensors  those that are stored in the format
    """

    codec: MatrixCodec
    tensors: Mapping[str, Matrices]
    distances: dict[str, float] = field(default_factory=dict)

    def watched(self, merge: Merge) -> Merge:
        """Return the merge, which adds to `distances`."""
        return replace(merge, changes={name: self._watching(name, change) for name, change in merge.changes.items()})

    def _watching(self, name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def merged(weight: Tensor) -> Tensor:
            result = change(weight)
            if name in self.tensors:
                before, after = (_first_rows(self.tensors[name].tensor, x) for x in (weight, result))
                codec = self.codec if weight.dtype == TORCH_DTYPES["bf16"] else replace(self.codec, dtype="fp32")
                cut = HFTensor(name, tuple(before.shape))
                error = codec.dequantized(cut, codec.quantized(cut, before)).float() - before.float()
                self.distances[name] = float(error.norm() / after.float().norm())
            return result

        return merged

    def __str__(self) -> str:
        low, high = min(self.distances.values()), max(self.distances.values())
        return (
            f"the adapter was trained on a base in {self.codec.format.name}: the merged matrices differ from that base "
            f"with the adapter by {low:.1%} to {high:.1%} (rms, {ROWS} rows of each)"
        )


def stored_base(
    run: FoundRun | None, base_dir: Path, registry: Registry, notice: Callable[[str], None]
) -> StoredBase | None:
    """Return the weight format of the run that wrote an adapter; None: it had none, or is unknown.

    A run.yaml that cannot be used is no reason not to merge: None, and `notice` says why.
    """
    if run is None:
        return None
    try:
        with run.explaining():
            return _stored_base(run, base_dir, registry)
    except (ConfigError, PluginError) as error:
        why = "; ".join(line.strip() for line in str(error).splitlines())
        notice(f"not shown: how far the model is from the base that the adapter was trained on, because of {why}")
        return None


def _stored_base(run: FoundRun, base_dir: Path, registry: Registry) -> StoredBase | None:
    loaded = load_config({**run.keys, "model": str(base_dir)}, registry=registry, source=str(run.path))
    chosen = chosen_weight_format(loaded, registry)
    if chosen is None:
        return None
    opened = open_run(loaded, registry)
    if QUANTIZATION in opened.model_config:  # trained on these files as they are
        return None
    recording = record(run_inputs(opened, cpu(), 1))
    stored = {param.name for param in recording.stored}
    tensors = {held.tensor.name: held for m in recording.weights if m.param in stored for held in matrices_in(m)}
    return StoredBase(MatrixCodec(*chosen, registry.ops, "bf16"), tensors)
