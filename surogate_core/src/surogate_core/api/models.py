"""Models: sizes, weights, and the function that records the forward program."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from pydantic import SkipValidation

from ..origin import Declared, Definition, Name
from ..program.inputs import BatchInputs
from ..program.value import Value

if TYPE_CHECKING:
    from ..program.builder import Builder


@runtime_checkable
class Dims(Protocol):
    """The sizes of a model, which its plugin derives from `config.json`. Core reads only these."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def n_layers(self) -> int: ...
    @property
    def max_positions(self) -> int:
        """Longest sequence in tokens that `config.json` allows."""


@dataclass(frozen=True)
class HFTensor(Declared):
    """A tensor of a Hugging Face checkpoint."""

    name: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class WeightMap(Declared):
    """A param that is the concatenation of checkpoint `tensors` along the first dimension. Export splits it again."""

    param: str
    tensors: tuple[HFTensor, ...]


@dataclass(frozen=True)
class Matrix:
    """A logical matrix of a param: `rows` consecutive rows. A fused param, such as [q; k; v], has several."""

    name: str
    rows: int


@dataclass(frozen=True, kw_only=True)
class ModelDef(Definition):
    """A model architecture.

    architectures   values of `config.json["architectures"]` that select it
    model_types     values of `config.json["model_type"]` that select it
    dims            (parsed config.json) -> Dims. Raises ConfigError with key and value.
    build           (builder, dims, batch) -> the scalar loss, or several. Emits the forward program. The gradient is
                    that of the sum of the losses. Reports and evaluations show the first, so an auxiliary loss (of a
                    router, for example) is a further one. Each loss must be an output of its own op.
    weights         (dims) -> one WeightMap per param of the program, in file order
    ignored_tensors (dims) -> fnmatch patterns of checkpoint tensors without information (buffers)
    tied_copies     (dims) -> {copy: original}: checkpoint tensors that may exist in addition, as copies of others. A
                    checkpoint in which the two differ is refused.
    in_transformers whether transformers has the architecture. Outputs of a run are then loaded with it once, and
                    `surogate verify` can compare.
    """

    name: Name
    summary: str
    architectures: tuple[str, ...]
    model_types: tuple[str, ...]
    dims: Callable[[Mapping[str, Any]], SkipValidation[Dims]]
    build: Callable[[Builder, Any, BatchInputs], Value | Sequence[Value]]
    weights: Callable[[Any], Sequence[WeightMap]]
    ignored_tensors: Callable[[Any], Sequence[str]] = lambda dims: ()
    tied_copies: Callable[[Any], Mapping[str, str]] = lambda dims: {}
    in_transformers: bool = True
