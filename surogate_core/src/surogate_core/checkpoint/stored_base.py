"""How far a merged model is from the stored base that its adapter was trained on.

An adapter of QLoRA is trained on rounded matrices and merged into those of the original checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from torch import Tensor

from ..api import HFTensor, Merge
from ..config.load import load_config, read_yaml
from ..planning.run import chosen_weight_format
from ..plugins.registry import Registry
from ..reference.rounding import TORCH_DTYPES
from .folders import RUN_FILE
from .matrix_codec import MatrixCodec

ROWS = 512
"""Rows of each matrix that are compared: the references of formats take minutes for all of a large model."""


@dataclass
class StoredBase:
    """The weight format of a base, and what was found of the matrices merged so far: {tensor: relative distance}."""

    codec: MatrixCodec
    distances: dict[str, float] = field(default_factory=dict)

    def watched(self, merge: Merge) -> Merge:
        """Return the merge, which adds to `distances`."""
        return replace(merge, changes={name: self._watching(name, change) for name, change in merge.changes.items()})

    def _watching(self, name: str, change: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        def merged(weight: Tensor) -> Tensor:
            result = change(weight)
            if weight.dim() == 2:
                self.distances[name] = self._distance(name, weight[:ROWS], result[:ROWS])
            return result

        return merged

    def _distance(self, name: str, weight: Tensor, merged: Tensor) -> float:
        codec = self.codec if weight.dtype == TORCH_DTYPES["bf16"] else replace(self.codec, dtype="fp32")
        error = codec.rounded(HFTensor(name, tuple(weight.shape)), weight).float() - weight.float()
        return float(error.norm() / merged.float().norm())

    def __str__(self) -> str:
        low, high = min(self.distances.values()), max(self.distances.values())
        return (
            f"the adapter was trained on a base in {self.codec.format.name}: the merged matrices differ from that base "
            f"with the adapter by {low:.1%} to {high:.1%} (rms, {ROWS} rows of each)"
        )


def stored_base(folder: Path, registry: Registry) -> StoredBase | None:
    """Return the weight format of the run that wrote an adapter, by the run.yaml beside it; None: it had none."""
    path = next((p for p in (folder / RUN_FILE, folder.parent / RUN_FILE) if p.is_file()), None)
    if path is None:
        return None
    raw: Mapping[str, object] = read_yaml(path)
    loaded = load_config(raw, registry=registry, source=str(path))
    chosen = chosen_weight_format(loaded, registry)
    return StoredBase(MatrixCodec(*chosen, registry.ops, "bf16")) if chosen else None
