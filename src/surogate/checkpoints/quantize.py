"""`surogate quantize`: a model's checkpoint with the matrices of its blocks in a weight format."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from surogate_core.api import ExportContext, ExportFormatDef, HFTensor, Rewritten, WeightMap
from surogate_core.assembly.assembly import Assembly
from surogate_core.errors import ConfigError
from surogate_core.planning.plan import Plan
from surogate_core.plugins.registry import Registry
from surogate_core.reference.rounding import TORCH_DTYPES

from ..config.load import LoadedConfig, load_config
from ..config.yaml import apply_overrides
from ..hub.config_json import QUANTIZATION, refused_quantized
from ..runs.chosen_format import Chosen
from ..runs.run import Run
from .base import open_base
from .base_files import stored_names
from .checked_form import CheckedForm
from .export import Export
from .export_source import Source
from .formed_weights import all_formed
from .linear_modules import KEYS, modules_of
from .matrix_codec import Matrices, MatrixCodec, by_matrix, matrices_in
from .stored_weights import locate

_KEYS = ("model_dtype", "torch_dtype", "quantize_lm_head", "quantize_embedding", "plugins")
"""Keys of core that change what is stored."""
_SOURCE = "surogate quantize"


def config_of(model: str, overrides: Sequence[str], registry: Registry) -> LoadedConfig:
    """Return the config of a run that stores `model` in the format that `overrides`, "key=value", select.

    Raises ConfigError for keys that do not change what is stored.
    """
    given = apply_overrides({}, overrides)
    if "model" in given:
        raise ConfigError(f"{_SOURCE}: model: is the first argument, {model}. Remove it from --set.")
    loaded = load_config(given | {"model": model, **KEYS}, registry=registry, mode="sft", source=_SOURCE)
    formats = registry.weight_formats().values()
    known = [*_KEYS, *(info.alias or name for f in formats for name, info in f.options.model_fields.items())]
    if other := sorted(set(given) - set(known)):
        raise ConfigError(
            f"{_SOURCE}: {', '.join(other)}: changes nothing here. Remove it from --set; keys that change what is "
            f"stored: {', '.join(known)}."
        )
    return loaded


def codec_of(run: Run, dtype: str) -> MatrixCodec:
    """Return the codec of the run's weight format for a model in `dtype`. Raises ConfigError if it has none."""
    if run.weight_format is None:
        keys = [f"{format.key}: true" for format in run.registry.weight_formats().values()]
        raise ConfigError(f"no weight format is selected. Set one of: {', '.join(keys) or 'none is installed'}.")
    format, options = run.weight_format
    return MatrixCodec(format, options, run.registry.ops, dtype)


def stored_tensors(assembly: Assembly) -> dict[str, Matrices]:
    """Return the checkpoint's tensors that the run stores in its weight format, by name."""
    return _matrices(assembly.weights, assembly.stored)


def _matrices(maps: Iterable[WeightMap], params: Collection[str]) -> dict[str, Matrices]:
    return {held.tensor.name: held for m in maps if m.param in params for held in matrices_in(m)}


def quantize_checkpoint(
    run: Run, planned: Plan, output: Path, notice: Callable[[str], None], make_room: Callable[[Sequence[str]], object]
) -> None:
    """Write the run's model to `output` with the matrices that the run stores in a weight format in that format.

    An export format of the weight format writes them. Without one they have the bits that the run would store, which
    rounds weights to its dtype first. `notice` gets what the format has to tell about the checkpoint. `make_room` is
    called with the names of the files once all are written, before they replace those of a model in `output`.

    Raises ConfigError if the format has no form in files, the model is quantized already, its files do not fit its
    config.json, or a weight is not finite.
    """
    name = run.weight_format[0].name if run.weight_format else ""
    own = (format for format in run.registry.export_formats().values() if format.weight_format == name)
    stored_export(run, planned, notice, next(own, None)).write(output, make_room)


def stored_export(
    run: Run, planned: Plan, notice: Callable[[str], None], format: ExportFormatDef | None = None
) -> Export:
    """Return the export of a run's model in its weight format, by an export format; None: by the format's ops.

    Raises ConfigError as `quantize_checkpoint` does.
    """
    codec, assembly = codec_of(run, planned.inputs.precision.model), planned.assembly
    stored, maps = stored_tensors(assembly), assembly.weights
    form = _form(run, codec, stored.values())
    base, names = open_base(run, maps), stored_names(run, maps)
    stacked = form.form.stacked
    apart = [by_matrix(m) if m.param in assembly.stored and not stacked else m for m in maps]
    matrices = set(stored) if stacked else {matrix.name for held in stored.values() for matrix in held.each}
    every = [tensor for m in base.maps for tensor in m.tensors]
    formed = all_formed(run.model_dir, locate(run.model_dir), run.form, every)
    in_files = _matrices(names.maps(maps), assembly.stored)
    stacks = {name: held for name, held in in_files.items() if len(held.each) > 1 and not stacked}
    if stacks:
        notice(_told_of_stack(next(iter(stacks.values())), codec.format.key))
    return Export(
        named=Path(run.config.model),
        source=Source(run.model_dir, formed, stacks=stacks),
        chosen=Chosen.of(format or _by_ops(codec, form)),
        registry=run.registry,
        notice=notice,
        linear=lambda tensors: modules_of(run, apart, matrices, names, tensors, stacks=stacked),
        model_dtype=codec.dtype,
        options=codec.options,
    )


def _by_ops(codec: MatrixCodec, form: CheckedForm) -> ExportFormatDef:
    def check(context: ExportContext) -> None:
        if line := form.form.notice(list(context.linear().matrices.values()), codec.options):
            context.notice(line)

    def parts(context: ExportContext, tensor: HFTensor) -> Mapping[str, Tensor]:
        rounded = tensor.load(context.tensors[tensor.name][...].to(TORCH_DTYPES[codec.dtype]))
        held = tensor.matrices
        matrix = HFTensor(tensor.name, held.shape[-2:])
        states = [codec.quantized(matrix, rows) for rows in rounded.split(matrix.shape[0])]
        found = form.save(held, [torch.cat(each) for each in zip(*states, strict=True)], codec.dtype)
        return {part: value.contiguous() for part, value in found.items()}

    def write(context: ExportContext, folder: Path) -> None:
        linear = context.linear()
        rewritten = [
            Rewritten(tensors=(name,), parts=partial(parts, context, tensor))
            for name, tensor in {**linear.matrices, **linear.stacks}.items()
        ]
        context.write_model(folder, rewritten, form.config(linear.others))

    return ExportFormatDef(name=codec.format.name, summary=codec.format.summary, check=check, write=write)


def _told_of_stack(held: Matrices, key: str) -> str:
    """Return what to tell about a checkpoint with a stack, which transformers holds in a parameter of its own."""
    first = held.each[0].name
    return (
        f"{held.tensor.name} is written as {len(held.each)} matrices, {first} and on, which transformers does not "
        f"read. Runs with {key}: true load them."
    )


def _form(run: Run, codec: MatrixCodec, tensors: Iterable[Matrices]) -> CheckedForm:
    """Return how files hold the run's weight format. Raises ConfigError if those of its model cannot."""
    for held in (held for held in tensors if held.tensor.layout):
        stacked = codec.format.checkpoints is not None and codec.format.checkpoints.stacked
        if not held.tensor.leading or (len(held.each) == 1 and not stacked):
            why = "of one matrix" if held.tensor.leading else "a layout without `leading`"
            what = f"{held.tensor.name} is {held.tensor.layout}, {why}, which no weight format can hold"
            raise ConfigError(f"{run.model_dir}: {what}.")
    if codec.format.checkpoints is None:
        raise ConfigError(f"{codec.format.key}: checkpoints cannot hold {codec.format.name}.")
    if run.config.quantize_embedding:
        raise ConfigError(
            "quantize_embedding: quantized checkpoints hold embeddings in floating point. Remove the key."
        )
    if QUANTIZATION in run.model_config:
        raise refused_quantized(run.model_dir, "They cannot be quantized again")
    return CheckedForm(codec.format, codec.format.checkpoints, codec.options)
