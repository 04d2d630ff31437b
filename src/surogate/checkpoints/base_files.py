"""The base of a run as its files have it: the names of tensors, and those that outputs have as they are."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from surogate_core.api import Dims, HFTensor, ModelDef, WeightMap
from surogate_core.assembly.assembly import Assembly
from surogate_core.errors import ConfigError
from surogate_core.plugins.registry import Registry

from ..hub.config_json import QUANTIZATION, read_config
from ..runs.published_weights import in_form_of
from ..runs.run import Run, named_model
from ..runs.stored_names import StoredNames, names_among
from .saved_tensors import SavedTensor, read_tensors
from .stored_weights import locate
from .tensor_file import STORED_AS


def stored_names(run: Run, maps: Sequence[WeightMap]) -> StoredNames:
    """Return the names in the files of a run's base, or those of the class in transformers if the run has no base."""
    return StoredNames({}) if run.config.from_scratch else names_in(run.model_dir, run.model, run.dims, maps)


def names_in(folder: Path, model: ModelDef, dims: Dims, maps: Sequence[WeightMap]) -> StoredNames:
    """Return the names in the files of a folder."""
    if not model.published_names(dims):
        return StoredNames({})
    return names_among({name for names in locate(folder).values() for name in names}, model, dims, maps)


def names_of_base(base_dir: Path, config: Mapping[str, Any], registry: Registry) -> StoredNames:
    """Return the names in the files of a base, by its parsed config.json; as they stand for what no plugin builds."""
    try:
        model, dims = named_model(config, registry, base_dir)
    except ConfigError:
        return StoredNames({})
    return names_in(base_dir, model, dims, model.weights(dims))


def maps_in_files(run: Run, assembly: Assembly) -> tuple[WeightMap, ...]:
    """Return the weight maps of a run with the names that the tensors have in the files of its base."""
    return stored_names(run, assembly.weights).maps(assembly.weights)


def moved_tensors(maps: Iterable[WeightMap]) -> dict[str, HFTensor]:
    """Return the tensors of weight maps that files have in another order than params, by name."""
    return {tensor.name: tensor for m in maps for tensor in m.tensors if tensor.layout}


def moved_in(folder: Path, names: Sequence[str], registry: Registry) -> dict[str, HFTensor]:
    """Return the tensors `names` of the model in a folder, which files have in another order than params.

    Raises ConfigError if no plugin says in which.
    """
    config = read_config(folder)
    try:
        registry.model_for(config)
    except ConfigError:
        kind = next(iter(config.get("architectures") or [config.get("model_type")]))
        raise ConfigError(
            f"{folder}: has {names[0]} in the order of the program, and no installed package, which would know that of "
            f"files, builds {kind}. Install the one that trained it, or name the run.yaml whose plugins have it: "
            "--config PATH."
        ) from None
    model, dims = named_model(config, registry)
    model = in_form_of(model, dims, names)
    maps = model.weights(dims)
    found = moved_tensors(names_among(names, model, dims, maps).maps(maps))
    if absent := sorted(set(names) - found.keys()):
        raise ConfigError(
            f"{folder}: has {absent[0]} in the order of the program, which {model.name} does not know. Use the version "
            "of its package that trained it."
        )
    return found


def kept_names(run: Run, names: StoredNames) -> set[str]:
    """Return the names of the tensors of a run's base that its outputs have as they are.

    Raises ConfigError if files lack what a pattern names, as those of a text model alone do, but for what they may
    lack by `ModelDef.may_lack`.
    """
    patterns = [names.of(pattern) for pattern in run.model.kept_tensors(run.dims)]
    if not patterns:
        return set()
    held = [name for found in locate(run.model_dir).values() for name in found]
    matching = {pattern: [name for name in held if fnmatchcase(name, pattern)] for pattern in patterns}
    optional = {names.of(pattern) for pattern in run.model.may_lack(run.dims)}
    if lacking := [pattern for pattern, found in matching.items() if not found and pattern not in optional]:
        raise ConfigError(
            f"{run.model_dir}: has no tensors {lacking[0]}, which {run.model.architectures[0]} has. Download the "
            "checkpoint again, or change its config.json to that of a model without them: name the class of the text "
            "model, with the keys of text_config, or set the number of such layers to 0."
        )
    return set().union(*matching.values())


def kept_tensors(run: Run, names: StoredNames) -> list[SavedTensor]:
    """Return the tensors of a run's base that its outputs have as they are. They are read when they are written.

    Raises ConfigError as `kept_names` does, and if files have one in FP8 where outputs would have copies: those of an
    adapter have none.
    """
    wanted = kept_names(run, names)
    if not wanted:
        return []
    files = locate(run.model_dir)
    tensors = read_tensors(path for path, found in files.items() if found & wanted)
    kept = [tensors[name] for name in sorted(wanted)]
    copied = run.form is not None and run.adapter is None
    if coded := [t for t in kept if copied and t.dtype.is_floating_point and t.dtype.itemsize == 1]:
        raise ConfigError(
            f"{coded[0].path}: {coded[0].name} is stored as {STORED_AS[coded[0].dtype]}, and outputs, which have no "
            f"{QUANTIZATION}, would have it as it is. Train an adapter, or use the original checkpoint of this model."
        )
    return kept
