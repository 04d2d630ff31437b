"""`surogate verify`: a run's model and recipe beside transformers, on this machine, before the run.

Forward and backward of a few rows by the run's own programs, executor and kernels, and by transformers in fp32 on the
same weights, which is the truth. Where a recipe computes in less than fp32, transformers in bf16 is measured by the
same truth: ours may be no farther away.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from .. import run
from ..api import WeightMap
from ..errors import ConfigError
from ..hub import CONFIG_FILES, TOKENIZER_FILES, WEIGHT_FILES, resolve_model_dir
from ..model_config import read_config
from ..plugins import load_registry
from ..prepare import Prepared, prepare
from .needs import Needs, estimate, refuse_unless_it_fits
from .tokens import Chosen, from_data, random_batch
from .verdict import Row, Verdict, compare

__all__ = ["Row", "Verdict", "Verification", "verify"]

DEFAULT_LENGTH = 512
"""Tokens of a row, unless the run's rows are shorter: what transformers keeps for its backward pass fits beside it."""


@dataclass(frozen=True)
class Verification:
    """What was compared, on what, and how it came out. tokens: what they are; device: where ours ran."""

    model: str
    recipe: str
    dtypes: str
    device: str
    weights: str
    tokens: str
    needs: Needs
    verdict: Verdict


def verify(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    rows: int = 2,
    length: int | None = None,
    layers: int | None = None,
    random_tokens: bool = False,
    notice: Callable[[str], None] = print,
) -> Verification:
    """Compare the model and recipe of a YAML file with transformers on this machine. Writes nothing.

    `rows` rows of `length` tokens (at most 512 of the run's own by default), of the run's data, or random ones where it
    names none or `random_tokens` says so; of a model cut to its first `layers`, if that is given. Raises ConfigError
    for what cannot be compared, or does not fit.
    """
    loaded = run.load(path, overrides)
    config = loaded.config
    length = length or min(config.sequence_len, DEFAULT_LENGTH)
    if not 2 <= length <= config.sequence_len:
        raise ConfigError(f"--length: {length} is not from 2 to the run's sequence_len, {config.sequence_len}.")
    changes = {
        "per_device_train_batch_size": rows,
        "sequence_len": length,
        "gradient_accumulation_steps": 1,
        "lmhead_chunks": "auto",
        "gpus": 1,
    }
    with tempfile.TemporaryDirectory(prefix="surogate-verify-") as name:
        scratch = Path(name)
        files = [*CONFIG_FILES, *TOKENIZER_FILES, *(() if config.from_scratch else WEIGHT_FILES)]
        model_dir = resolve_model_dir(config.model, files)
        if layers is not None:
            changes["model"] = str(_cut(model_dir, layers, scratch / "cut"))
        smaller = run.load(path, [*overrides, *(f"{key}={json.dumps(value)}" for key, value in changes.items())])
        prepared = prepare(smaller, load_registry(), run.usable_device(), files, 1)
        model = prepared.ingredients.model
        if not model.in_transformers:
            raise ConfigError(f"model: transformers has no {model.name}, as its plugin says: nothing to compare with.")
        if config.datasets and not random_tokens:
            chosen = from_data(run.tokenize(loaded, notice), prepared, config.train_seed)
        else:
            chosen = random_batch(prepared, config.train_seed)
        needed = estimate(prepared, chosen)
        refuse_unless_it_fits(prepared, needed)
        verdict = _compare(prepared, chosen, model_dir, scratch, notice)
    precision = prepared.ingredients.precision
    return Verification(
        model=config.model + (f", its first {layers} layers" if layers else ""),
        recipe=config.recipe + "".join(f" with {adapter.name}" for adapter, _ in prepared.ingredients.adapters),
        dtypes=f"model {precision.model}, products {precision.matmul}, their gradients {precision.gradient}",
        device=prepared.report.device.title,
        weights="random, as a run from scratch begins" if config.from_scratch else "of the checkpoint",
        tokens=chosen.told,
        needs=needed,
        verdict=verdict,
    )


def _compare(
    prepared: Prepared, chosen: Chosen, model_dir: Path, scratch: Path, notice: Callable[[str], None]
) -> Verdict:
    """Ours first, since from scratch it draws the weights; one model at a time is in memory."""
    import torch

    from . import ours, theirs

    whole = read_config(model_dir)
    model, dims = prepared.ingredients.model, prepared.ingredients.dims
    skipped = _names(model.weights(model.dims(whole))) - _names(model.weights(dims))
    mine = ours.observe(prepared, chosen, scratch, sorted(skipped), notice)
    gc.collect()  # a watched worker refers to itself: its buffers would stay
    truth = theirs.observe(prepared, chosen, scratch, torch.float32)
    layers = _layers(prepared)
    for missing in (mine.gradients.keys() ^ truth.gradients.keys(), layers.keys() ^ truth.gradients.keys()):
        if missing:
            raise ConfigError(f"{model_dir}: {min(missing)} has a gradient on one side only: nothing to compare with.")
    precision = prepared.ingredients.precision
    half = None
    if {precision.model, precision.matmul, precision.gradient} != {"fp32"}:
        half = theirs.observe(prepared, chosen, scratch, torch.bfloat16)
    return compare(mine, truth, half, layers, len(truth.states) - 2)


def _names(weights: Iterable[WeightMap]) -> set[str]:
    return {tensor.name for weight in weights for tensor in weight.tensors}


def _layers(prepared: Prepared) -> dict[str, int]:
    """Each trained tensor's layer, in the order of the layers: first what is outside."""
    stored = {weight.param: [tensor.name for tensor in weight.tensors] for weight in prepared.assembly.weights}
    trained = sorted(prepared.assembly.trainable, key=lambda v: v.block)
    return {name: v.block for v in trained for name in stored.get(v.name, [v.name])}


def _cut(model_dir: Path, layers: int, folder: Path) -> Path:
    """The model's files by reference, and a config.json of its first `layers`."""
    config = read_config(model_dir)
    has = config.get("num_hidden_layers")
    if not isinstance(has, int) or not 1 <= layers <= has:
        raise ConfigError(f"--layers: {layers} is not from 1 to the model's num_hidden_layers, {has!r}.")
    folder.mkdir()
    for path in model_dir.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path.resolve())
    kinds = config.get("layer_types")
    cut = {"layer_types": kinds[:layers]} if isinstance(kinds, list) else {}
    (folder / "config.json").write_text(json.dumps({**config, **cut, "num_hidden_layers": layers}), encoding="utf-8")
    return folder
