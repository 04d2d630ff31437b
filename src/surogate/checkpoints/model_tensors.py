"""The tensors of a model, each read when it is asked for: as files have it, changed, or out of a checkpoint form."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import prod
from pathlib import Path
from types import EllipsisType, MappingProxyType
from typing import Protocol

import torch
from torch import Tensor

from surogate_core.api import ExportTensor, HFTensor, StoredTensor
from surogate_core.errors import ConfigError, ProgramError
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.runtime.finite_check import all_finite, contents

from .formed_weights import FormedWeights
from .manifest import HashedFile
from .saved_tensors import SavedTensor, read_tensors
from .stored_weights import locate
from .tensor_file import STORED_AS, Stored
from .weights_file import LOADABLE

PIECE_BYTES = 64 << 20
"""Bytes of a tensor that are in memory while it is copied."""


class ModelTensor(ExportTensor, Protocol):
    """A tensor of a model, and the file that holds it.

    by_rows: reading some rows takes no memory for the others
    """

    @property
    def path(self) -> Path: ...
    @property
    def by_rows(self) -> bool: ...


@dataclass(frozen=True)
class FileTensor:
    """A tensor as files have it."""

    saved: SavedTensor
    path: Path
    by_rows = True

    @property
    def name(self) -> str:
        return self.saved.name

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.saved.shape)

    @property
    def dtype(self) -> torch.dtype:
        return self.saved.dtype

    def __getitem__(self, rows: slice | EllipsisType) -> Tensor:
        height, width = (self.shape or (1,))[0], prod(self.shape[1:])
        first, last, _ = (slice(None) if isinstance(rows, EllipsisType) else rows).indices(height)
        flat = torch.empty(max(0, last - first) * width, dtype=self.dtype)
        for at, block in self.saved.read(first * width, flat.numel()):
            flat[at - first * width :][: block.numel()] = block
        return flat.view(self.shape if isinstance(rows, EllipsisType) else (max(0, last - first), *self.shape[1:]))


@dataclass(frozen=True)
class ReadTensor:
    """A tensor that is made when it is read: `read` opens it, as a weight in a checkpoint form."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    path: Path
    read: Callable[[], StoredTensor]
    by_rows: bool = True

    def __getitem__(self, rows: slice | EllipsisType) -> Tensor:
        return self.read()[rows]


def changed(tensor: ModelTensor, change: Callable[[Tensor], Tensor], dtype: torch.dtype) -> ReadTensor:
    """Return a tensor with another value, in a dtype. All of it is computed at each reading."""

    def read() -> Tensor:
        value = change(tensor[...])
        if tuple(value.shape) != tensor.shape:
            raise ProgramError(f"{tensor.name} is {list(tensor.shape)}, and {list(value.shape)} when it is changed")
        return value.to(dtype)

    return ReadTensor(tensor.name, tensor.shape, dtype, tensor.path, read, by_rows=False)


def in_stack(tensor: ModelTensor, layout: HFTensor, each: Sequence[HFTensor], index: int) -> ReadTensor:
    """Return the matrix `each[index]` of a stack, as rows of the param.

    layout: the stack, whose layout has `leading`. each: its matrices, in the order of the param, as many of each index
    of its first dimension.
    """
    several = len(each) // tensor.shape[0]
    first = index - index % several
    above, matrix = sum(other.shape[0] for other in each[first:index]), each[index]

    def read() -> Tensor:
        whole = layout.load(tensor[index // several : index // several + 1])
        return whole[above : above + matrix.shape[0]].contiguous()

    return ReadTensor(matrix.name, matrix.shape, tensor.dtype, tensor.path, read, by_rows=False)


def finite(tensor: ModelTensor) -> ReadTensor:
    """Return the tensor; reading it raises ConfigError, naming its file, if there is NaN or inf in what is read."""

    @dataclass(frozen=True)
    class Finite:
        def __getitem__(self, rows: slice | EllipsisType) -> Tensor:
            read = tensor[rows]
            if not all_finite([read]):
                raise ConfigError(
                    f"{tensor.path}: {tensor.name} holds {contents(tensor[...])}. Use another checkpoint."
                )
            return read

    return ReadTensor(tensor.name, tensor.shape, tensor.dtype, tensor.path, Finite, tensor.by_rows)


@contextmanager
def model_tensors(
    model_dir: Path,
    changes: Mapping[str, Callable[[Tensor], Tensor]] = MappingProxyType({}),
    formed: FormedWeights | None = None,
    dtype: str = "bf16",
    changed_in: str | None = None,
) -> Iterator[dict[str, ModelTensor]]:
    """Open the tensors of a model, in the order of its files and by name. Yields {name: tensor}.

    changes     {name: function of the old value}
    formed      the weights that the files hold in a checkpoint form: they are read in `dtype`, their parts left out
    changed_in  the dtype of changed tensors; None: that of each as it was

    Raises ConfigError for a tensor that is quantized otherwise, and is changed or would lose its scales.
    """
    formed = formed or FormedWeights(model_dir)
    with formed.reading() as weight:
        found: dict[str, ModelTensor] = {}
        for path, held in locate(model_dir).items():
            saved = read_tensors([path])
            made = {name for name in formed.tensors if formed.file_of(name) == path}
            for name in sorted({name for name in held if not formed.leaves_out(name)} | made):
                if name in made:
                    found[name] = _formed(weight, name, formed, TORCH_DTYPES[dtype])
                else:
                    found[name] = FileTensor(saved[name], path)
                    _refuse_stored(found[name], name in changes, formed)
                if name in changes:
                    own = found[name].dtype if changed_in is None else TORCH_DTYPES[changed_in]
                    found[name] = changed(found[name], changes[name], own)
        yield found


def _formed(
    weight: Callable[[str, torch.dtype], StoredTensor], name: str, formed: FormedWeights, dtype: torch.dtype
) -> ReadTensor:
    return ReadTensor(name, formed.tensors[name].shape, dtype, formed.file_of(name), lambda: weight(name, dtype))


def _refuse_stored(tensor: ModelTensor, changed: bool, formed: FormedWeights) -> None:
    """Raise ConfigError for a tensor that is to be changed, or to lose its scales, and is not in floating point."""
    stored = STORED_AS[tensor.dtype]
    if formed.form is not None and stored.startswith("F8"):
        raise ConfigError(
            f"{tensor.path}: {tensor.name} is stored as {stored}, without what {formed.form[0].name} reads it with."
        )
    if changed and stored not in LOADABLE:
        raise ConfigError(f"{tensor.path}: {tensor.name} is stored as {stored}; use the unquantized model.")


@dataclass(frozen=True)
class Copied:
    """A tensor that is written as it is. `written` is called afterwards."""

    tensor: ModelTensor
    written: Callable[[], object]
    first = 0

    @property
    def name(self) -> str:
        return self.tensor.name

    @property
    def dtype(self) -> torch.dtype:
        return self.tensor.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        return self.tensor.shape

    @property
    def count(self) -> int:
        return prod(self.shape)

    def write(self, file: HashedFile) -> None:
        for rows in self._pieces():
            Stored.of(self.name, self.tensor[rows]).write(file)
        self.written()

    def _pieces(self) -> Iterator[slice | EllipsisType]:
        if not self.tensor.by_rows or not self.shape:
            yield ...
            return
        step = max(1, PIECE_BYTES // max(1, prod(self.shape[1:]) * self.dtype.itemsize))
        yield from (slice(at, at + step) for at in range(0, self.shape[0], step))
