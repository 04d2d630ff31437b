"""Models: sizes, inputs, weights, and the function that records the forward program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from ..origin import Definition
from ..program.inputs import BatchInputs
from ..program.value import Value

if TYPE_CHECKING:
    from ..program.builder import Builder


@runtime_checkable
class Dims(Protocol):
    """A model's sizes, as its plugin derives them from `config.json`. Core reads only these."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def max_positions(self) -> int:
        """Longest sequence that the checkpoint's configuration allows, in tokens."""
        ...


@dataclass(frozen=True)
class HFTensor:
    """A tensor of a Hugging Face checkpoint."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WeightMap:
    """A param is the concatenation of `tensors` along their first dimension. Export splits it again."""

    param: str
    tensors: tuple[HFTensor, ...]


@dataclass(frozen=True, kw_only=True)
class ModelDef(Definition):
    """An architecture.

    architectures   names of `config.json["architectures"]`; `model_types` of `config.json["model_type"]`
    dims            parsed config.json -> Dims; raises ConfigError naming key and value
    build           emits the forward program and returns the scalar loss
    weights         one WeightMap per param of the program, in file order
    ignored_tensors fnmatch patterns of checkpoint tensors that carry nothing (buffers)
    tied_copies     checkpoint tensors that may be there too, each an equal copy of another: {copy: original}. A file
                    in which the two differ is refused
    in_transformers whether transformers, and what stands on it, has the architecture: a run's outputs are then loaded
                    with it once, and `surogate verify` can compare
    """

    name: str
    summary: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    dims: Callable[[Mapping[str, Any]], Dims]
    build: Callable[[Builder, Any, BatchInputs], Value]
    weights: Callable[[Any], Sequence[WeightMap]]
    ignored_tensors: Callable[[Any], Sequence[str]] = lambda dims: ()
    tied_copies: Callable[[Any], Mapping[str, str]] = lambda dims: {}
    in_transformers: bool = True
