"""`surogate quantize`: a model's checkpoint with the matrices of its blocks in a weight format."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path

from torch import Tensor

from surogate_core.api import WeightMap
from surogate_core.assembly.assembly import Assembly
from surogate_core.errors import ConfigError
from surogate_core.planning.plan import Plan
from surogate_core.plugins.registry import Registry
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.runtime.finite_check import contents

from ..config.load import LoadedConfig, load_config
from ..config.yaml import apply_overrides
from ..hub.config_json import QUANTIZATION, refused_quantized
from ..runs.run import Run
from .base import open_base
from .base_files import stored_names
from .checked_form import CheckedForm
from .formed_weights import all_formed
from .hf import CONFIG, save_files, write_changed
from .matrix_codec import Matrices, MatrixCodec, matrices_in
from .stored_weights import file_of, locate

_MODULE = ".weight"
_HEAD = "lm_head"
_ALL = ".*"
"""End of a pattern of tensors: all of a module."""


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
    keys = {"model": model, "sequence_len": 16, "per_device_train_batch_size": 1}
    loaded = load_config(given | keys, registry=registry, mode="sft", source=_SOURCE)
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
    run: Run, planned: Plan, output: Path, notice: Callable[[str], None], make_room: Callable[[], object]
) -> None:
    """Write the run's model to `output` with the matrices that the run stores in a weight format in that format.

    They have the bits that the run would store, which rounds weights to its dtype first. `notice` gets what the format
    has to tell about the checkpoint. `make_room` is called once all files are written, before they replace those of a
    model in `output`.

    Raises ConfigError if the format has no form in files, the model is quantized already, its files do not fit its
    config.json, or a weight is not finite.
    """
    codec, stored = codec_of(run, planned.inputs.precision.model), stored_tensors(planned.assembly)
    form, maps = _form(run, codec, stored.values()), planned.assembly.weights
    base = open_base(run, maps)
    others = [
        t.name.removesuffix(_MODULE) for m in maps for t in m.tensors if len(t.shape) == 2 and t.name not in stored
    ]
    head = () if _HEAD + _MODULE in stored else (_HEAD,)  # a tied one is not among the tensors
    kept = [pattern.removesuffix(_ALL) for pattern in run.model.kept_tensors(run.dims)]
    config = form.config(list(dict.fromkeys((*head, *others, *kept))))
    names = stored_names(run, maps)
    tensors = _matrices(names.maps(maps), planned.assembly.stored)
    every = [tensor for m in base.maps for tensor in m.tensors]
    formed = all_formed(run.model_dir, locate(run.model_dir), run.form, every)
    matrices = [held.each[0] for held in tensors.values() if len(held.each) == 1]
    if line := form.form.notice(matrices, codec.options):
        notice(line)
    if stacks := [held for held in tensors.values() if len(held.each) > 1]:
        notice(_told_of_stack(stacks[0], codec.format.key))

    def quantized(name: str, weight: Tensor) -> Mapping[str, Tensor]:
        rounded = weight.to(TORCH_DTYPES[codec.dtype])
        if not (found := contents(rounded)).finite:
            raise ConfigError(f"{file_of(run.model_dir, name)}: {name} holds {found}. Use another checkpoint.")
        if name not in tensors:
            return {name: weight}
        parts: dict[str, Tensor] = {}
        for matrix, rows in tensors[name].of(rounded):
            parts |= form.save(matrix, codec.quantized(matrix, rows), codec.dtype)
        return {part: tensor.contiguous() for part, tensor in parts.items()}

    def write(folder: Path) -> None:
        names = {tensor.name for tensor in every}
        write_changed(folder, run.model_dir, names, quantized, {QUANTIZATION: {**config}}, formed, codec.dtype)

    save_files(output, write, CONFIG, make_room=make_room)


def _told_of_stack(held: Matrices, key: str) -> str:
    """Return what to tell about a checkpoint with a stack, which transformers holds in a parameter of its own."""
    first = held.each[0].name
    return (
        f"{held.tensor.name} is written as {len(held.each)} matrices, {first} and on, which transformers does not "
        f"read: it draws these experts anew, with a warning. Runs with {key}: true load them."
    )


def _form(run: Run, codec: MatrixCodec, tensors: Iterable[Matrices]) -> CheckedForm:
    """Return how files hold the run's weight format. Raises ConfigError if those of its model cannot."""
    for held in (held for held in tensors if held.tensor.layout):
        if not held.tensor.leading or len(held.each) == 1:
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
