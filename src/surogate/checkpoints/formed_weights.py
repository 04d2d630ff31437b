"""The weights of a model's files that are in a checkpoint form: all are checked, then each is read piece by piece."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property
from math import prod
from pathlib import Path
from types import EllipsisType
from typing import Any

import torch
from torch import Tensor

from surogate_core.api import DTYPES, HFTensor, Part, StoredTensor
from surogate_core.errors import ConfigError
from surogate_core.runtime.finite_check import all_finite, contents, nonfinite_weights

from ..reporting.text import names_text
from ..runs.published_form import Form
from .weights_file import AGAIN, LOADABLE, opened

PIECE = 1 << 20
"""Elements that are read at a time: in fp32 they fit a core's cache."""
_ROWS = 128
"""Pieces of more rows have a multiple of it, so that they begin where blocks usually do."""


@dataclass(frozen=True)
class FormedWeights:
    """The weights of a checkpoint that are in a form.

    form     the form and its config; None: no weights are in any
    paths    {name of a tensor of the checkpoint: its file}
    tensors  {name: the weight}
    parts    {name of a weight: the tensors of the files that hold it}
    """

    model_dir: Path
    form: Form | None = None
    paths: Mapping[str, Path] = field(default_factory=dict)
    tensors: Mapping[str, HFTensor] = field(default_factory=dict)
    parts: Mapping[str, Sequence[Part]] = field(default_factory=dict)

    @cached_property
    def part_names(self) -> frozenset[str]:
        return frozenset(part.name for parts in self.parts.values() for part in parts)

    @property
    def ignored(self) -> Sequence[str]:
        """Patterns of tensors that may stand beside."""
        return () if self.form is None else self.form[0].ignored

    def leaves_out(self, name: str) -> bool:
        """Return whether a tensor of the files is none of the model that is read: a part, or one that is ignored."""
        return name in self.part_names or any(fnmatchcase(name, pattern) for pattern in self.ignored)

    def file_of(self, weight: str) -> Path:
        return self.paths[self.parts[weight][0].name]

    @contextmanager
    def reading(self) -> Iterator[Callable[[str, torch.dtype], FormedWeight]]:
        """Open the files. Yields (name of a weight, dtype) -> the weight, to be read in that dtype."""
        with ExitStack() as stack:
            files = {path: stack.enter_context(opened(path)) for path in {self.paths[p] for p in self.part_names}}

            def weight(name: str, dtype: torch.dtype) -> FormedWeight:
                parts = {part.name: files[self.paths[part.name]].get_slice(part.name) for part in self.parts[name]}
                return FormedWeight(self, self.tensors[name], parts, dtype)

            yield weight


@dataclass(frozen=True)
class FormedWeight:
    """A weight that is read when its rows are asked for."""

    of: FormedWeights
    tensor: HFTensor
    parts: Mapping[str, StoredTensor]
    dtype: torch.dtype

    def __getitem__(self, rows: slice | EllipsisType) -> Tensor:
        height, *others = self.tensor.shape
        first, last, _ = (slice(None) if isinstance(rows, EllipsisType) else rows).indices(height)
        step = max(1, PIECE // max(1, prod(others)))
        step -= step % _ROWS if step > _ROWS else 0
        result = torch.empty((max(0, last - first), *others), dtype=self.dtype)
        for at in range(first, last, step):
            piece = range(at, min(at + step, last))
            result[at - first : piece.stop - first] = self._read(piece)
        return result

    def _read(self, rows: range) -> Tensor:
        assert self.of.form is not None
        form, config = self.of.form
        read = form.read(self.tensor, self.parts, rows, config)
        wanted = (len(rows), *self.tensor.shape[1:])
        if not isinstance(read, Tensor) or tuple(read.shape) != wanted or not read.is_floating_point():
            found = f"{read.dtype} {list(read.shape)}" if isinstance(read, Tensor) else f"a {type(read).__name__}"
            what = f"returned {found} for {len(rows)} rows of {self.tensor.name}, expected floats {list(wanted)}"
            raise form.failed("read", what)
        if not all_finite([read.contiguous()]):
            file, shape = self.of.file_of(self.tensor.name), list(self.tensor.shape)
            where = f"{file.name}: {self.tensor.name} {shape}, rows from {rows.start} on"
            raise nonfinite_weights(self.of.model_dir, [f"{where}: {contents(read.contiguous())}"])
        return read


def find_formed(
    model_dir: Path, files: Mapping[Path, set[str]], form: Form | None, tensors: Iterable[HFTensor]
) -> FormedWeights:
    """Return those of `tensors` that the files hold in a form. All parts of each are there and have their shapes.

    Raises ConfigError, naming file and tensor, if a part is missing, or has another shape or dtype, or one in floating
    point is not finite.
    """
    if form is None:
        return FormedWeights(model_dir)
    paths = {name: path for path, names in files.items() for name in names}
    found: dict[str, HFTensor] = {}
    parts: dict[str, Sequence[Part]] = {}
    with ExitStack() as stack:
        handles = {path: stack.enter_context(opened(path)) for path in files}

        def header(name: str) -> Any:
            return handles[paths[name]].get_slice(name)

        for tensor in tensors:
            if tensor.name in paths and header(tensor.name).get_dtype() in LOADABLE:
                continue
            if own := _parts(form, tensor, paths):
                for part in own:
                    _check_part(form, tensor, part, paths[part.name], header(part.name))
                found[tensor.name], parts[tensor.name] = tensor, own
    return FormedWeights(model_dir, form, paths, found, parts)


def _parts(form: Form, tensor: HFTensor, paths: Mapping[str, Path]) -> Sequence[Part]:
    """Return the parts of a weight, all of which are there; () if none is. Raises ConfigError if one is missing."""
    definition, config = form
    try:
        parts = definition.parts(tensor, config)
    except ConfigError as error:
        if tensor.name not in paths:
            return ()
        raise ConfigError(f"{paths[tensor.name]}: {tensor.name} {error}") from None
    held = [part.name for part in parts if part.name in paths]
    missing = [part.name for part in parts if part.name not in paths]
    if held and missing:
        raise ConfigError(
            f"{paths[held[0]]}: {held[0]} needs {names_text(missing)}, which the checkpoint lacks: {tensor.name} is "
            f"stored in {definition.summary}. {AGAIN}"
        )
    return parts if held else ()


def all_formed(
    model_dir: Path, files: Mapping[Path, set[str]], form: Form | None, tensors: Iterable[HFTensor]
) -> FormedWeights:
    """Return all weights that the files hold in a form: those of `tensors`, and others that look like them.

    Raises ConfigError like `find_formed`.
    """
    wanted = {tensor.name: tensor for tensor in tensors}
    known = find_formed(model_dir, files, form, wanted.values())
    if form is None:
        return known
    found = {name for names in files.values() for name in names}
    for path, names in files.items():
        with opened(path) as file:
            for name in sorted(names - known.part_names - wanted.keys()):
                header = file.get_slice(name)
                if header.get_dtype() not in LOADABLE:
                    tensor = HFTensor(name, tuple(header.get_shape()))
                    wanted |= {name: tensor} if _has_all(form, tensor, found) else {}
    return find_formed(model_dir, files, form, wanted.values())


def _has_all(form: Form, tensor: HFTensor, found: set[str]) -> bool:
    try:
        return {part.name for part in form[0].parts(tensor, form[1])} <= found
    except ConfigError:  # of no shape of the form
        return False


def _check_part(form: Form, tensor: HFTensor, part: Part, path: Path, header: Any) -> None:
    """Raise ConfigError unless a part has its shape and one of its dtypes, and is finite if it is in floating point."""
    shape, dtype = tuple(header.get_shape()), header.get_dtype()
    dtypes = list(dict.fromkeys(DTYPES[name].file_name for name in part.dtypes))
    if dtype not in dtypes or shape != part.shape:
        beside = "" if part.name == tensor.name else f" beside {tensor.name} {list(tensor.shape)}"
        raise ConfigError(
            f"{path}: {part.name} is {dtype} {list(shape)}, expected {' or '.join(dtypes)} {list(part.shape)}{beside} "
            f"in {form[0].summary}. Check that the weights and config.json are of the same model."
        )
    if dtype in LOADABLE and not (held := contents(header[...])).finite:
        raise nonfinite_weights(path.parent, [f"{path.name}: {part.name} {list(shape)}: {held}"])
