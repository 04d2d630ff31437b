"""The params of a base that its files hold in a weight format."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from surogate_core.api import WeightMap
from surogate_core.errors import ConfigError

from .checked_form import CheckedForm
from .matrix_codec import by_matrix, matrices_in
from .weights_file import LOADABLE, opened


@dataclass(frozen=True)
class BaseFormat:
    """The weight format of a base, and the params that it may hold in it.

    remedies  {another param: what to do if it holds that in the format}
    """

    form: CheckedForm
    params: frozenset[str]
    remedies: Mapping[str, str]


def as_quantized(
    maps: Sequence[WeightMap], files: Mapping[Path, set[str]], base: BaseFormat | None
) -> Sequence[WeightMap]:
    """Return the maps with each matrix of a stack by itself where files in the weight format of `base` hold it so."""
    if base is None or base.form.form.stacked:
        return maps
    found = {name for names in files.values() for name in names}

    def is_split(m: WeightMap) -> bool:
        if not any(tensor.leading for tensor in m.tensors):
            return False
        names = {matrix.name for held in matrices_in(m) for matrix in held.each} - {t.name for t in m.tensors}
        return not names.isdisjoint(found)

    return [by_matrix(m) if is_split(m) else m for m in maps]


def quantized_params(
    files: Mapping[Path, set[str]], maps: Sequence[WeightMap], base: BaseFormat | None
) -> frozenset[str]:
    """Return the params that the files hold in the weight format of `base`: those whose tensors are not in floating
    point. Raises ConfigError for a param that may not be, or of which some tensors are and others are not.
    """
    if base is None:
        return frozenset()
    if base.form.form.stacked:
        return _in_parts(files, maps, base)
    maps = as_quantized(maps, files, base)
    param_of = {tensor.name: m.param for m in maps for tensor in m.tensors}
    full: dict[str, dict[str, Path]] = {}
    coded: dict[str, dict[str, Path]] = {}
    for path, names in files.items():
        with opened(path) as file:
            for name in sorted(names & param_of.keys()):
                kind = full if file.get_slice(name).get_dtype() in LOADABLE else coded
                kind.setdefault(param_of[name], {})[name] = path
    moved = {tensor.name: tensor.layout for m in maps for tensor in m.tensors if tensor.layout}
    for param, tensors in coded.items():
        name, path = next(iter(tensors.items()))
        if found := sorted(moved.keys() & tensors.keys()):
            raise ConfigError(
                f"{path}: {found[0]} is stored quantized and {moved[found[0]]}, which no weight format reads. Use the "
                "original checkpoint of this model."
            )
        if param not in base.params:
            raise ConfigError(f"{path}: {name} is stored quantized. {base.remedies[param]}")
        if param in full:
            raise _half(path, name, next(iter(full[param])))
    return frozenset(coded)


def _half(path: Path, quantized: str, other: str) -> ConfigError:
    return ConfigError(
        f"{path}: {quantized} is quantized and {other} is not, but the two are one matrix here. "
        "Use the original checkpoint of this model."
    )


def _in_parts(files: Mapping[Path, set[str]], maps: Sequence[WeightMap], base: BaseFormat) -> frozenset[str]:
    """Return the params whose tensors the files hold in parts with names of their own. Raises like `quantized_params`,
    and for a tensor that is there in both forms."""
    path_of = {name: path for path, names in files.items() for name in names}
    coded = set[str]()
    for m in maps:
        held = {t.name: [name for name in base.form.parts(t.name) if name in path_of] for t in m.tensors}
        for tensor in m.tensors:
            if tensor.name in path_of and held[tensor.name]:
                raise ConfigError(
                    f"{path_of[tensor.name]}: holds {tensor.name} and {held[tensor.name][0]}, which are the same "
                    "weight in two forms, and nothing says which is right. Remove the one that is not of this model."
                )
            if held[tensor.name] and tensor.layout and not tensor.leading:
                raise ConfigError(
                    f"{path_of[held[tensor.name][0]]}: {tensor.name} is stored quantized and {tensor.layout}, which no "
                    "weight format reads. Use the original checkpoint of this model."
                )
        quantized = [parts[0] for parts in held.values() if parts]
        if not quantized:
            continue
        first = path_of[quantized[0]]
        if m.param not in base.params:
            raise ConfigError(f"{first}: {quantized[0]} is stored quantized. {base.remedies[m.param]}")
        if others := [name for name, parts in held.items() if not parts and name in path_of]:
            raise _half(first, quantized[0], others[0])
        coded.add(m.param)
    return frozenset(coded)
