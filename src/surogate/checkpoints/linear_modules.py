"""The linear modules of a model's blocks: those whose matrices a weight format would store. No torch."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from surogate_core.api import ExportFormatDef, ExportTensor, LinearModules, WeightMap
from surogate_core.assembly.assemble import record
from surogate_core.errors import ConfigError
from surogate_core.machine.devices import cpu
from surogate_core.plugins.registry import Registry

from ..config.load import load_config
from ..runs.inputs import run_inputs
from ..runs.published_weights import in_form_of
from ..runs.run import Run, open_run
from ..runs.stored_names import StoredNames, names_among

KEYS = {"sequence_len": 16, "per_device_train_batch_size": 1}
"""Keys of a run that is only asked for its model."""

_MODULE = ".weight"
_HEAD = "lm_head"
_ANY = "*"
"""End of a pattern of tensors: all of a module, where a dot stands before it."""


def modules_of(
    run: Run,
    maps: Sequence[WeightMap],
    stored: Collection[str],
    names: StoredNames,
    held: Mapping[str, ExportTensor],
    stacks: bool = False,
) -> LinearModules:
    """Return the linear modules whose tensors are `stored`, by their names in files, and the other modules.

    held: the tensors of the files. stacks: stacks of experts among `stored` are returned as such, and not refused.
    """
    tensors = [tensor for m in maps for tensor in m.tensors]
    matrices = {names.of(t.name): replace(t, name=names.of(t.name)) for t in tensors if t.name in stored}
    of_experts = {name: tensor for name, tensor in matrices.items() if stacks and tensor.leading}
    matrices = {name: tensor for name, tensor in matrices.items() if name not in of_experts}
    if moved := [tensor for tensor in matrices.values() if tensor.layout]:
        keys = " or ".join(f"{format.key}=true" for format in run.registry.weight_formats().values())
        others = [format.name for format in run.registry.export_formats().values() if format.stacks]
        raise ConfigError(
            f"{run.model_dir}: {moved[0].name} is {moved[0].layout}, which servers do not read in this format. Use "
            f"--format {' or '.join(['hf', *others])}; for runs, `surogate quantize` writes a matrix for each: "
            f"--set {keys}."
        )
    others = [] if _HEAD + _MODULE in stored else [_HEAD]  # a tied one is not among the tensors
    others += [t.name for t in tensors if len(t.shape) > 1 and t.name.endswith(_MODULE) and t.name not in stored]
    towers = []
    for pattern in run.model.kept_tensors(run.dims):
        beginning = pattern.removesuffix(_ANY)
        in_files = names.of(beginning)
        own = [name for name in held if name.startswith(in_files)]
        if own:
            towers.append(beginning.removesuffix("."))
        others += [beginning + name.removeprefix(in_files) for name in own if len(held[name].shape) > 1]
    both = [each for name in others for each in (name, names.of(name))]
    modules = dict.fromkeys(name.removesuffix(_MODULE) for name in [*both, *towers])
    return LinearModules(matrices=matrices, others=list(modules), towers=towers, stacks=of_experts)


def linear_modules(
    model_dir: Path, held: Mapping[str, ExportTensor], registry: Registry, format: ExportFormatDef | None = None
) -> LinearModules:
    """Return the linear modules of the model in a folder, whose files have the tensors `held`.

    format: what they are for. Its weight format may store some of them alone, and it may hold stacks.

    Raises ConfigError if no plugin builds the model, or its files do not have a matrix in the shape of config.json.
    """
    loaded = load_config({"model": str(model_dir), **KEYS}, registry=registry, mode="sft", source=str(model_dir))
    run = open_run(loaded, registry)
    run = replace(run, model=in_form_of(run.model, run.dims, set(held)))  # stacks may be opened as their matrices
    draft = record(run_inputs(run, cpu(), 1))
    found = [
        info
        for info in draft.params.values()
        if info.of_model and info.kind == "matrix" and info.param.block >= 0 and len(info.param.shape) == 2
        if not info.precise
    ]
    own = registry.weight_formats().get(format.weight_format) if format else None
    params = {info.param.name for info in (own.stores(found) if own and found else found)}
    stored = {tensor.name for m in draft.weights if m.param in params for tensor in m.tensors}
    names = names_among(set(held), run.model, run.dims, draft.weights)
    return modules_of(run, draft.weights, stored, names, held, bool(format and format.stacks))


def refuse_other_shapes(model_dir: Path, linear: LinearModules, tensors: Mapping[str, ExportTensor]) -> None:
    """Raise ConfigError unless the files have all matrices, each in its shape."""
    for tensor in (*linear.matrices.values(), *linear.stacks.values()):
        found = tensors.get(tensor.name)
        if found is None or found.shape != tensor.shape:
            has = "lacks" if found is None else f"has {list(found.shape)} for"
            raise ConfigError(
                f"{model_dir}: the checkpoint {has} {tensor.name}, {list(tensor.shape)} by config.json. Check that the "
                "weights and config.json are of the same model."
            )
