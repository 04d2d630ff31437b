"""The names of a model's tensors in files, where these have others than its class in transformers. No torch."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from surogate_core.api import Dims, ModelDef, WeightMap


@dataclass(frozen=True)
class StoredNames:
    """A form of names in which a model is published. begins: {beginning of a name: what files have in its place}."""

    begins: Mapping[str, str]

    def of(self, name: str) -> str:
        """Return the name in files of a tensor, or of a pattern of tensors."""
        begin = next((begin for begin in self.begins if name.startswith(begin)), "")
        return f"{self.begins.get(begin, '')}{name.removeprefix(begin)}"

    def maps(self, maps: Iterable[WeightMap]) -> tuple[WeightMap, ...]:
        """Return weight maps with the names that the tensors have in files."""
        if not self.begins:
            return tuple(maps)
        return tuple(
            replace(m, tensors=tuple(replace(tensor, name=self.of(tensor.name)) for tensor in m.tensors)) for m in maps
        )


def names_among(held: Collection[str], model: ModelDef, dims: Dims, maps: Sequence[WeightMap]) -> StoredNames:
    """Return the names in files that hold the tensors `held`: of the forms in which the model is published, the one of
    which they have the most."""
    forms = [StoredNames(begins) for begins in ({}, *model.published_names(dims))]
    tensors = [tensor.name for m in maps for tensor in m.tensors]
    return max(forms, key=lambda form: sum(form.of(name) in held for name in tensors))
