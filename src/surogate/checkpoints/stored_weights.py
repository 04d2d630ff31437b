"""The weights in the safetensors files of a Hugging Face checkpoint, checked before any of them is read.

Tensors are read one at a time, so that no second copy of the model is ever in memory. Pickled files are never opened.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from functools import cached_property, partial
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from surogate_core.api import HFTensor, WeightMap
from surogate_core.api.regular_file import is_regular
from surogate_core.errors import ConfigError
from surogate_core.runtime.filling import Upload, fill
from surogate_core.runtime.finite_check import all_finite, contents, nonfinite_weights
from surogate_core.runtime.pieces import Pieces

from ..hub.config_json import read_json
from ..hub.files import PICKLED
from ..reporting.text import names_text
from ..runs.published_form import Form
from .formed_weights import FormedWeights, find_formed
from .moved_tensors import moved_rows
from .quantized_base import BaseFormat, as_quantized, quantized_params
from .weights_file import AGAIN, LOADABLE, opened

WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
RANGES_FOLDER = "model_ranges"
"""Folder of a checkpoint whose weights several processes wrote: their ranges, and the index of files to be made."""

COMPARED_ROWS = 4096
"""Rows of a tensor and its copy that are compared at a time: keeps the memory for it below 1 GiB."""


@dataclass(frozen=True)
class StoredWeights:
    """The weights of a checkpoint whose names, shapes and dtypes are those of `maps`.

    files      {file: its tensors}
    base       the weight format of the checkpoint; None: all its weights are in floating point
    quantized  params that it holds in that format, which `load` skips
    formed     the weights that it holds in a checkpoint form, which `load` reads in floating point
    """

    model_dir: Path
    maps: Sequence[WeightMap]
    files: Mapping[Path, set[str]]
    base: BaseFormat | None = None
    quantized: frozenset[str] = frozenset()
    formed: FormedWeights = field(default_factory=lambda: FormedWeights(Path()))

    def load_quantized(self, stored: Mapping[str, Sequence[Tensor]]) -> Mapping[str, int]:
        """Copy the quantized ones of some params into the states that hold them, `stored` by param name.

        Return {param: how many of its states, the first ones, have been filled}. Raises ConfigError, naming file and
        tensor, for parts that the format refuses, or with NaN or inf.
        """
        base, given = self.base, self.quantized & stored.keys()
        if base is None or not given:
            return {}
        filled: dict[str, Sequence[Tensor]] = {}
        with self._parts() as part:

            def load(m: WeightMap, upload: Upload) -> None:
                targets = stored[m.param]
                for tensor in m.tensors:
                    parts = {name: part(name) for name in base.form.parts(tensor.name)}
                    with _naming(self._file_of[next(iter(parts))], tensor.name):
                        states = base.form.load(tensor.matrices, parts, targets)
                    for target, state in zip(targets, states, strict=False):
                        upload.copy(target.narrow(0, 0, len(state)), state)
                    filled.setdefault(m.param, stored[m.param][: len(states)])
                    targets = [target[len(state) :] for target, state in zip(targets, states, strict=False)]
                if any(len(target) for target in targets):
                    what = f"returned fewer rows for the matrices of {m.param} than its states have"
                    raise base.form.format.failed("checkpoints.load", what)

            fill(partial(load, m) for m in self.maps if m.param in given)
        # On the device, where it takes a fraction of the time of the copy.
        if not all_finite(state for states in filled.values() for state in states):
            broken = {param for param, states in filled.items() if not all_finite(states)}
            raise nonfinite_weights(self.model_dir, list(self._nonfinite(broken, base)))
        return {param: len(states) for param, states in filled.items()}

    def _nonfinite(self, params: Collection[str], base: BaseFormat) -> Iterator[str]:
        """Yield a line for each part of these quantized params with NaN or inf. Some of their states have."""
        with self._parts() as part:
            for tensor in (tensor for m in self.maps if m.param in params for tensor in m.tensors):
                for name in base.form.parts(tensor.name):
                    held = contents(read := part(name))
                    if not held.finite:
                        yield f"{self._file_of[name].name}: {name} {list(read.shape)}: {held}"

    @cached_property
    def _file_of(self) -> Mapping[str, Path]:
        return {name: path for path, names in self.files.items() for name in names}

    @contextmanager
    def _parts(self) -> Iterator[Callable[[str], Tensor]]:
        """Open all files. Yields a function that reads a tensor."""
        with ExitStack() as stack:
            files = {path: stack.enter_context(opened(path)) for path in self.files}
            yield lambda name: files[self._file_of[name]].get_tensor(name)

    def load(self, params: Mapping[str, Pieces]) -> None:
        """Copy into `params` (by param name) the elements that a process has of them, converting dtypes."""
        given = [m for m in self.maps if m.param in params and m.param not in self.quantized]
        found = {tensor.name: params[m.param].rows(row, tensor.rows) for m in given for tensor, row in rows_of(m)}
        moved = {tensor.name: tensor for m in given for tensor in m.tensors if tensor.layout}
        places = {name: elements for name, elements in found.items() if elements.count}

        def load(weight: Callable[[str], Any], name: str, upload: Upload) -> None:
            elements, width, stored = places[name], prod(places[name].shape[1:]), weight(name)
            first, last = elements.first // width, -(-(elements.first + elements.count) // width)
            parts = moved_rows(moved[name], stored, first, last) if name in moved else [(first, stored[first:last])]
            for row, rows in parts:
                _copy(elements, row * width, rows.reshape(-1), upload)

        formed = places.keys() & self.formed.tensors.keys()
        for path, names in self.files.items():
            if plain := names & places.keys() - formed:
                with opened(path) as file:
                    fill(partial(load, file.get_slice, name) for name in sorted(plain))
        with self.formed.reading() as weight:
            fill(
                partial(load, lambda name: weight(name, places[name].tensors[0].dtype), name) for name in sorted(formed)
            )


def _copy(elements: Pieces, first: int, given: Tensor, upload: Upload) -> None:
    """Copy elements of a tensor, from the one of index `first` on, as far as a process has them."""
    at = elements.first
    for target in elements.tensors:
        begin, end = max(at, first), min(at + target.numel(), first + given.numel())
        if begin < end:
            upload.copy(target[begin - at : end - at], given[begin - first : end - first])
        at += target.numel()


def open_weights(
    model_dir: Path,
    maps: Sequence[WeightMap],
    ignored: Sequence[str] = (),
    copies: Mapping[str, str] = MappingProxyType({}),
    base: BaseFormat | None = None,
    form: Form | None = None,
) -> StoredWeights:
    """Return the weights of a checkpoint, ready to be loaded. `base`: the weight format that it is stored in. `form`:
    the checkpoint form that it is stored in instead, which is read in floating point.

    `ignored`: patterns of tensors that the checkpoint may hold besides. `copies`: {copy: original}, tensors that it may
    hold as equal copies of others.

    All names, shapes, dtypes and copies are checked here. Raises ConfigError, naming file and tensor, for a missing,
    unexpected, wrongly shaped or quantized tensor, for a copy that differs, for a missing, truncated or corrupt file,
    and if there are only pickled weights.
    """
    files = locate(model_dir)
    maps = as_quantized(maps, files, base)
    wanted = {tensor.name: tensor for m in maps for tensor in m.tensors}
    found = {name for names in files.values() for name in names}
    quantized = quantized_params(files, maps, base)
    in_format = [tensor.name for m in maps if m.param in quantized for tensor in m.tensors]
    parts = {part for name in in_format if base for part in base.form.parts(name)}
    others = base.form.form.ignored if base else ()
    formed = find_formed(model_dir, files, form, wanted.values())
    parts |= formed.part_names
    plain = wanted.keys() - formed.tensors.keys() - ({*in_format} - parts)
    _check_names(model_dir, plain | parts, found, [*ignored, *copies, *others, *formed.ignored])
    for path, names in files.items():
        with opened(path) as file:
            for name in sorted(names & plain - set(in_format)):
                _check_tensor(path, file, wanted[name])
    for copy, original in copies.items():
        if copy in found:
            _check_copy(files, copy, wanted[original], formed)
    return StoredWeights(model_dir, maps, files, base, quantized, formed)


@contextmanager
def _naming(path: Path, tensor: str) -> Iterator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {tensor}: {error}") from None


def file_of(model_dir: Path, tensor: str) -> Path:
    """Return the file of a checkpoint that holds a tensor, or the folder if none does."""
    return next((path for path, names in locate(model_dir).items() if tensor in names), model_dir)


def rows_of(m: WeightMap) -> Iterator[tuple[HFTensor, int]]:
    """Yield the checkpoint's tensors of a param, each with its first row in the param."""
    row = 0
    for tensor in m.tensors:
        yield tensor, row
        row += tensor.rows[0]


def locate(model_dir: Path) -> dict[Path, set[str]]:
    """Return the checkpoint's files and the tensors in each, as the files' headers have them."""
    if (model_dir / WEIGHTS).exists():
        _refuse_two_models(model_dir)
        paths = [model_dir / WEIGHTS]
        indexed: dict[str, Path] = {}
    elif (model_dir / INDEX).exists():
        weight_map = read_weight_map(model_dir / INDEX)
        missing = sorted({shard for shard in weight_map.values() if not is_regular(model_dir / shard)})
        if missing:
            raise ConfigError(f"{model_dir / INDEX}: names {names_text(missing)}, which {model_dir} lacks. {AGAIN}")
        indexed = {name: model_dir / shard for name, shard in weight_map.items()}
        paths = sorted(set(indexed.values()))
    else:
        raise ConfigError(_no_weights(model_dir))
    files: dict[Path, set[str]] = {}
    for path in paths:
        with opened(path) as file:
            files[path] = set(file.keys())
    for name, path in indexed.items():
        if name not in files[path]:
            raise ConfigError(f"{model_dir / INDEX}: says that {name} is in {path.name}, but it is not. {AGAIN}")
    listed = {path: {name for name, at in indexed.items() if at == path} for path in paths}
    return listed if indexed else files


def _refuse_two_models(model_dir: Path) -> None:
    """Raise ConfigError if a folder has both one file and shards, unless the first row of every tensor is the same."""
    single, index = model_dir / WEIGHTS, model_dir / INDEX
    places = read_weight_map(index) if index.exists() else {}
    shards = {name: model_dir / shard for name, shard in places.items() if shard != WEIGHTS}
    if not shards or not all(is_regular(shard) for shard in shards.values()):
        return  # the index is left of what is gone
    with ExitStack() as stack:
        own = stack.enter_context(opened(single))
        files = {path: stack.enter_context(opened(path)) for path in sorted({*shards.values()})}
        held = {name for file in files.values() for name in file.keys()}  # noqa: SIM118, no mapping
        differing = sorted({*own.keys()} ^ held) or sorted(held ^ shards.keys())
        differing = differing or [name for name, path in shards.items() if _differs(own, files[path], name)]
    if differing:
        raise ConfigError(
            f"{model_dir}: holds two models, {WEIGHTS} and the shards of {INDEX}, which differ in {differing[0]} "
            f"({len(differing)} such tensors). transformers reads {WEIGHTS}. Remove the files of the one that is old."
        )


def _differs(file: Any, other: Any, name: str) -> bool:
    mine, theirs = file.get_slice(name), other.get_slice(name)
    if mine.get_shape() != theirs.get_shape() or mine.get_dtype() != theirs.get_dtype():
        return True
    return bool(mine.get_shape()) and mine[:1].ne(theirs[:1]).any().item() is True


def read_weight_map(path: Path) -> dict[str, str]:
    """Return the content of an index, {tensor: name of its file}. Raises ConfigError if it is none."""
    weight_map = read_json(path, AGAIN).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise ConfigError(f"{path}: has no weight_map. {AGAIN}")
    for name, shard in weight_map.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not shard.endswith(".safetensors"):
            raise ConfigError(
                f"{path}: {name}: must name a .safetensors file in the folder of the index (got {shard!r})."
            )
    return weight_map


def _no_weights(model_dir: Path) -> str:
    if any(path for pattern in PICKLED for path in model_dir.glob(pattern)):
        return (
            f"{model_dir}: holds pickled weights only; they can run code when opened and are never read. If you trust "
            "the file, convert it: AutoModelForCausalLM.from_pretrained(...).save_pretrained(...)."
        )
    if any(model_dir.glob("adapter_model.safetensors")):
        return f"{model_dir}: holds an adapter, not a model. Name the base model."
    if (model_dir / RANGES_FOLDER).is_dir():
        return (
            f"{model_dir}: several processes wrote this model, each its ranges. Make files of it that are read here: "
            f"surogate export {model_dir} OUTPUT"
        )
    return f"{model_dir}: holds neither {WEIGHTS} nor {INDEX}. {AGAIN} To start without weights: from_scratch: true."


def _check_names(model_dir: Path, wanted: set[str], found: set[str], ignored: Sequence[str]) -> None:
    missing = sorted(wanted - found)
    unexpected = sorted(name for name in found - wanted if not any(fnmatchcase(name, pattern) for pattern in ignored))
    faults = [f"lacks {names_text(missing)}, which config.json asks for"] if missing else []
    if unexpected:
        faults.append(f"holds {names_text(unexpected)}, which a model of this config.json does not have")
    if faults:
        raise ConfigError(
            f"{model_dir}: the checkpoint {', and '.join(faults)}. "
            "Check that the weights and config.json are of the same model."
        )


def _check_tensor(path: Path, file: Any, expected: HFTensor) -> None:
    header = file.get_slice(expected.name)
    shape, dtype = tuple(header.get_shape()), header.get_dtype()
    if dtype not in LOADABLE:
        raise ConfigError(
            f"{path}: {expected.name} is stored as {dtype}; weights must be F32, BF16, F16 or F64. "
            "Use the original checkpoint of this model, not a quantized one."
        )
    if shape != expected.shape:
        raise ConfigError(
            f"{path}: {expected.name} is {list(shape)}, expected {list(expected.shape)} from config.json."
        )


def _check_copy(files: Mapping[Path, set[str]], copy: str, original: HFTensor, formed: FormedWeights) -> None:
    """Raise ConfigError unless the tensor `copy` has the values of `original`. The stored dtypes may differ."""
    path, twin = (next(path for path, names in files.items() if name in names) for name in (copy, original.name))
    n_different, first = 0, ""
    with opened(path) as file, opened(twin) as other, formed.reading() as weight:
        _check_tensor(path, file, HFTensor(copy, original.shape))
        copied, originals = file.get_slice(copy), other.get_slice(original.name)
        if original.name in formed.tensors:
            originals = weight(original.name, torch.float32)
        for row in range(0, original.shape[0], COMPARED_ROWS):
            rows = slice(row, row + COMPARED_ROWS)
            different = copied[rows].double() != originals[rows].double()
            if different.any():
                n_different += int(different.sum())
                at, *rest = different.nonzero()[0].tolist()
                first = first or str([row + at, *rest])
    if n_different:
        raise ConfigError(
            f"{path}: {copy} differs from {original.name} in {n_different:,} of {prod(original.shape):,} elements, "
            f"first at {first}, but config.json ties the two. Set tie_word_embeddings: false in config.json to train "
            f"both, or remove {copy} from the file to train the tied model."
        )
