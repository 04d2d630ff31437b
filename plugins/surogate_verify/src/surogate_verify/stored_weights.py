"""The base of a run as the run computes with it, and how far that is from the files.

A run may store it in a weight format, or read files in a checkpoint form. transformers gets the dequantized weights, so
that a comparison shows errors of the computation alone. The errors of a weight format are reported by themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from math import inf, log10, sqrt
from pathlib import Path

from torch import Tensor

from surogate.checkpoints.base_files import maps_in_files, stored_names
from surogate.checkpoints.formed_weights import all_formed
from surogate.checkpoints.hf import write_merged
from surogate.checkpoints.matrix_codec import Matrices
from surogate.checkpoints.quantize import codec_of, stored_tensors
from surogate.checkpoints.stored_weights import locate
from surogate.hub.config_json import QUANTIZATION, refused_quantized

from .programs import Subject

BLOCK = 64
"""Consecutive weights of a row in the figure of the worst block."""


@dataclass(frozen=True)
class StoredMatrix:
    """The distance of a stored matrix from that of the files.

    snr    mean square of the weights over that of the errors, in dB; inf without an error
    worst  largest relative error, in rms, of 64 consecutive weights of a row
    """

    name: str
    layer: int
    snr: float
    worst: float


def write_stored(subject: Subject, folder: Path) -> list[StoredMatrix]:
    """Write the base as the run stores it, dequantized, to `folder`. Return the errors, in the order of the layers.

    Raises ConfigError if the files hold the format already, so that there is nothing to compare with.
    """
    if QUANTIZATION in subject.run.model_config:
        raise refused_quantized(subject.run.model_dir, "surogate verify compares with the weights before that")
    assembly = subject.plan.assembly
    codec, tensors = codec_of(subject.run, subject.plan.inputs.precision.model), stored_tensors(assembly)
    layers = {v.name: v.block for v in assembly.declared}
    layer_of = {t.name: layers[m.param] for m in assembly.weights for t in m.tensors}
    found: list[StoredMatrix] = []

    def stored(held: Matrices, weight: Tensor) -> Tensor:
        tensor, rounded = held.tensor, codec.rounded(held, weight)
        found.append(_compared(tensor.name, layer_of[tensor.name], tensor.load(weight), tensor.load(rounded)))
        return rounded

    names = stored_names(subject.run, assembly.weights)
    _write(subject, folder, {names.of(name): partial(stored, held) for name, held in tensors.items()})
    order = list(tensors)
    return sorted(found, key=lambda matrix: (matrix.layer, order.index(matrix.name)))


def write_read(subject: Subject, folder: Path) -> None:
    """Write the base, whose files are in a checkpoint form, as the run reads it, to `folder`."""
    _write(subject, folder, {})


def _write(subject: Subject, folder: Path, changes: Mapping[str, Callable[[Tensor], Tensor]]) -> None:
    """Write the base with some of its tensors changed. Those in a checkpoint form are not rounded."""
    folder.mkdir()
    run = subject.run
    tensors = (tensor for m in maps_in_files(run, subject.plan.assembly) for tensor in m.tensors)
    formed = all_formed(run.model_dir, locate(run.model_dir), run.form, tensors)
    own = subject.plan.inputs.precision.model
    write_merged(folder, run.model_dir, changes, formed=formed, dtype="fp32", changed_in=own)


def _compared(name: str, layer: int, weight: Tensor, stored: Tensor) -> StoredMatrix:
    exact = weight.float()
    error = stored.float() - exact
    signal, noise = float(exact.square().sum()), float(error.square().sum())
    width = exact.shape[1] // BLOCK * BLOCK or exact.shape[1]
    blocks = [x[:, :width].reshape(-1, min(BLOCK, width)).square().sum(1) for x in (error, exact)]
    worst = float((blocks[0] / blocks[1].clamp(min=1e-30)).max())
    return StoredMatrix(name, layer, 10 * log10(signal / noise) if noise else inf, sqrt(worst))
