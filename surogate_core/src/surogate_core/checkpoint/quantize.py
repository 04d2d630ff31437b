"""`surogate quantize`: a model's checkpoint with the matrices of its blocks in a weight format."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from ..api import CheckpointForm, HFTensor
from ..errors import ConfigError
from ..hub.config_json import QUANTIZATION, refused_quantized
from ..planning.assembly import Assembly
from ..planning.run import Run
from ..reference.rounding import TORCH_DTYPES
from ..runtime.finite_check import contents
from .hf import CONFIG, save_files, write_quantized
from .matrix_codec import MatrixCodec
from .stored_weights import file_of, open_weights

_MODULE = ".weight"
_HEAD = "lm_head"


def codec_of(run: Run, dtype: str) -> MatrixCodec:
    """Return the codec of the run's weight format for a model in `dtype`. Raises ConfigError if it has none."""
    if run.weight_format is None:
        keys = [f"{format.key}: true" for format in run.registry.weight_formats().values()]
        raise ConfigError(f"no weight format is selected. Set one of: {', '.join(keys) or 'none is installed'}.")
    format, options = run.weight_format
    return MatrixCodec(format, options, run.registry.ops, dtype)


def stored_tensors(assembly: Assembly) -> dict[str, HFTensor]:
    """Return the checkpoint's tensors that the run stores in its weight format, by name."""
    return {tensor.name: tensor for m in assembly.weights if m.param in assembly.stored for tensor in m.tensors}


def quantize_checkpoint(
    run: Run, assembly: Assembly, output: Path, make_room: Callable[[], object] = lambda: None
) -> None:
    """Write the run's model to `output` with the matrices that the run stores in a weight format in that format.

    `make_room` is called once all files are written, before they replace those of a model in `output`.

    Raises ConfigError if the format has no form in files, the model is quantized already, its files do not fit its
    config.json, or a weight is not finite.
    """
    codec, tensors = codec_of(run, "bf16"), stored_tensors(assembly)
    form = codec.format.checkpoints
    if form is None:
        raise ConfigError(f"{codec.format.key}: checkpoints cannot hold {codec.format.name}.")
    if run.config.quantize_embedding:
        raise ConfigError(
            "quantize_embedding: quantized checkpoints hold embeddings in floating point. Remove the key."
        )
    if QUANTIZATION in run.model_config:
        raise refused_quantized(run.model_dir, "They cannot be quantized again")
    open_weights(run.model_dir, assembly.weights, run.model.ignored_tensors(run.dims), run.model.tied_copies(run.dims))
    every = [tensor for m in assembly.weights for tensor in m.tensors]
    others = [t.name.removesuffix(_MODULE) for t in every if len(t.shape) == 2 and t.name not in tensors]
    head = () if _HEAD + _MODULE in tensors else (_HEAD,)  # a tied one is not among the tensors
    config = form.config(list(dict.fromkeys((*head, *others))), codec.options)

    def quantized(name: str, weight: Tensor) -> Mapping[str, Tensor]:
        _refuse_nonfinite(run.model_dir, name, weight)
        return _parts(form, codec, tensors[name], weight) if name in tensors else {name: weight}

    names = {tensor.name for tensor in every}
    save_files(
        output,
        lambda fresh: write_quantized(fresh, run.model_dir, names, quantized, config),
        CONFIG,
        make_room=make_room,
    )


def _refuse_nonfinite(model_dir: Path, name: str, weight: Tensor) -> None:
    """Raise ConfigError, naming file and tensor, if `weight` holds NaN or inf."""
    found = contents(weight)
    if not found.finite:
        raise ConfigError(f"{file_of(model_dir, name)}: {name} holds {found}. Use another checkpoint.")


def _parts(form: CheckpointForm, codec: MatrixCodec, tensor: HFTensor, weight: Tensor) -> dict[str, Tensor]:
    wide = weight.dtype in (TORCH_DTYPES["fp32"], TORCH_DTYPES["fp64"])
    exact = MatrixCodec(codec.format, codec.options, codec.ops, "fp32" if wide else codec.dtype)
    parts = form.save(tensor, exact.quantized(tensor, weight), exact.dtype, codec.options)
    return {name: part.contiguous() for name, part in parts.items()}
