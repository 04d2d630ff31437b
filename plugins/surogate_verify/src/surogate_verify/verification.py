"""`surogate verify`: compares a run's model and recipe with transformers, on this machine, before the run.

A few rows go forward and backward through the run's own programs, executor and kernels, and through transformers in
float64 with the same weights. The float64 results are the truth. How far ours may be from it follows from the error of
transformers itself in the run's precision. A run that computes in less than fp32 is compared twice: the model in fp32,
which shows errors that are smaller than the rounding of the run, and then the run itself.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from surogate import run
from surogate.config.adapter import Mode
from surogate.config.schema import TrainConfig
from surogate.hub.config_json import read_config, text_part, with_text_part
from surogate.hub.files import CONFIG_FILES, TOKENIZER_FILES, WEIGHT_FILES, resolve_model_dir
from surogate.runs.plan import plan_run
from surogate.training import start as training
from surogate_core.api import WeightMap
from surogate_core.errors import ConfigError
from surogate_core.plugins.discovery import load_registry

from .needs import Needs, estimate, refuse_unless_it_fits
from .programs import Subject, computes_in_fp32, in_fp32, in_plain_torch, refuse_training_only, without_dropout
from .rows import ComparedRows, from_data, random_rows
from .verdict import Row, Verdict, compare

if TYPE_CHECKING:
    from surogate_core.assembly.inputs import PlanInputs

    from .observed import Observed
    from .stored_weights import StoredMatrix
    from .yardstick import Yardstick

__all__ = ["Extent", "Row", "Verdict", "Verification", "verify"]


@dataclass(frozen=True)
class Extent:
    """The part of a run to compare.

    rows           rows of the batch
    length         tokens per row; None: the run's `sequence_len`, at most 512
    layers         compare only the model's first `layers`; None: all of them
    random_tokens  use random tokens even if the run has data
    """

    rows: int = 2
    length: int | None = None
    layers: int | None = None
    random_tokens: bool = False


WHOLE_MODEL = Extent()

DEFAULT_LENGTH = 512
"""Tokens per row, unless the run's rows are shorter: transformers' activations in float64 then fit into memory."""


@dataclass(frozen=True)
class Verification:
    """The subject of a comparison, its extent and its results.

    device    where our side ran
    tokens    a description of the rows
    left_out  kinds of training-only ops, such as dropout, that were off on both sides
    in_fp32   the comparison of the model in fp32; None if the run itself computes in fp32
    stored    the errors of the matrices that the run stores in a weight format. Both sides compute with these matrices.
    """

    model: str
    recipe: str
    dtypes: str
    device: str
    weights: str
    tokens: str
    left_out: tuple[str, ...]
    needs: Needs
    in_fp32: Verdict | None
    verdict: Verdict
    stored: tuple[StoredMatrix, ...] = ()

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """The comparisons, the one in fp32 first: an error of the model is an error of the run too."""
        return (self.in_fp32, self.verdict) if self.in_fp32 else (self.verdict,)

    @property
    def passed(self) -> bool:
        return all(verdict.passed for verdict in self.verdicts)

    @property
    def first_wrong(self) -> Row | None:
        """Return the layer or tensor to look at first."""
        return next((verdict.first_wrong for verdict in self.verdicts if not verdict.passed), None)


def verify(
    path: str | Path | Mapping[str, Any],
    overrides: Sequence[str] = (),
    extent: Extent = WHOLE_MODEL,
    *,
    mode: Mode = "train",
    notice: Callable[[str], None] = print,
) -> Verification:
    """Compare the model and recipe of a config with transformers on this machine. Writes nothing.

    The rows are of the run's data, or random if it has none. `mode` is the command whose defaults the run takes. Raises
    ConfigError for what cannot be compared or does not fit.
    """
    loaded = run.load(path, overrides, mode)
    config = loaded.config
    length = extent.length or min(config.sequence_len, DEFAULT_LENGTH)
    if not 2 <= length <= config.sequence_len:
        raise ConfigError(f"--length: {length} is not from 2 to the run's sequence_len, {config.sequence_len}.")
    scored = load_registry(files=config.plugins).loss(config.loss).reference_loss is not None
    changes = {
        "per_device_train_batch_size": extent.rows,
        "sequence_len": length,
        "gradient_accumulation_steps": 1,
        "lmhead_chunks": "auto",
        **{key: TrainConfig.model_fields[key].default for key in ("loss", "reference") if not scored},
        "numerics_report_steps": 0,
        "attn_bwd_chunks": 1,
        "gpus": 1,
        "ranks_per_gpu": 1,
    }
    with tempfile.TemporaryDirectory(prefix="surogate-verify-") as name:
        scratch = Path(name)
        files = [*CONFIG_FILES, *TOKENIZER_FILES, *(() if config.from_scratch else WEIGHT_FILES)]
        model_dir = resolve_model_dir(config.model, files)
        if extent.layers is not None:
            changes["model"] = str(_cut(model_dir, extent.layers, scratch / "cut"))

        def planned(revise: Callable[[PlanInputs], PlanInputs], **more: object) -> Subject:
            settings = [f"{key}={json.dumps(value)}" for key, value in (changes | more).items()]
            smaller = run.load(path, [*overrides, *settings], mode)
            opened = run.open_run(smaller, files)
            return Subject(opened, plan_run(opened, training.device_of_torch(training.usable_device()), 1, revise))

        left_out: set[str] = set()
        subject = planned(partial(without_dropout, left_out=left_out))
        model = subject.plan.inputs.model
        if not model.in_transformers:
            raise ConfigError(f"model: its plugin says that transformers has no {model.name}: nothing to compare with.")
        refuse_training_only(subject)
        choices = [model.row_choice(subject.run.model_config, n) for n in (config.sequence_len, length)]
        if choices[0] and not choices[1]:
            notice(f"--length {length}: shorter rows choose otherwise than those of the run. {choices[0].says}")
        stored, dequantized = _stored(subject, scratch)
        exact_already = computes_in_fp32(subject.plan.inputs)
        exact = None
        if not exact_already:
            dequantized["kernels"] = "allow_reference"
            exact = planned(in_fp32, **dequantized)
            if said := in_plain_torch(exact.plan):
                notice(said)
                exact = planned(in_fp32, **dequantized, deterministic="false")  # which torch does not promise
        if config.datasets and not extent.random_tokens:
            data = run.tokenize(subject.run.loaded if scored else loaded, notice)
            rows = from_data(data, subject.plan.inputs, config.train_seed)
        else:
            rows = random_rows(subject.plan.inputs, config.train_seed)
        needed = estimate(subject, exact, rows)
        refuse_unless_it_fits(subject, needed)
        gc.freeze()  # imported libraries are not collected: 2 s per call once transformers is imported
        try:
            verdict_in_fp32, verdict = _compare(subject, exact, rows, model_dir, scratch, notice)
        finally:
            gc.unfreeze()
    precision = subject.plan.inputs.precision
    return Verification(
        model=config.model + (f", its first {extent.layers} layers" if extent.layers else ""),
        recipe=config.recipe + "".join(f" with {adapter.name}" for adapter, _ in subject.plan.inputs.adapters),
        dtypes=f"model {precision.model}, products {precision.matmul}, their gradients {precision.gradient}",
        device=subject.plan.report.device.title,
        weights="random, as in a run from scratch" if config.from_scratch else "of the checkpoint",
        tokens=rows.description,
        left_out=tuple(sorted(left_out)),
        needs=needed,
        in_fp32=verdict_in_fp32,
        verdict=verdict,
        stored=tuple(stored),
    )


def _stored(subject: Subject, scratch: Path) -> tuple[Sequence[StoredMatrix], dict[str, object]]:
    """Write the base for transformers if the run stores it in a weight format, or its files have a checkpoint form.

    Return the errors of the format, and the keys of a run that computes with the same weights without it.
    """
    from surogate.config.schema import STORED_BY

    from .stored_weights import write_read, write_stored

    if subject.run.weight_format is None:
        if subject.run.form is not None:
            write_read(subject, scratch / "model")
        return (), {}

    format, _ = subject.run.weight_format
    without = dict.fromkeys((format.key, *STORED_BY.values()), False)
    return write_stored(subject, scratch / "model"), {"model": str(scratch / "model"), **without}


def _compare(
    subject: Subject,
    exact: Subject | None,
    rows: ComparedRows,
    model_dir: Path,
    scratch: Path,
    notice: Callable[[str], None],
) -> tuple[Verdict | None, Verdict]:
    """Return (the comparison in fp32 if the run computes in less, that of the run). Holds one model at a time.

    Our side goes first, because in a run from scratch it draws the weights. Those that transformers cannot read from
    the user's files are written to `scratch`.
    """
    import torch

    from . import surogate_side, transformers_side, yardstick

    inputs = subject.plan.inputs
    skipped = _skipped(subject, model_dir)
    params = [v for v in subject.plan.assembly.declared if v.role == "param"]
    stored = {v.name: v.dtype for v in params}

    def observe_ours(of: Subject) -> Observed:
        observed = surogate_side.observe(of, rows, scratch, skipped, stored, notice)
        gc.collect()  # a watched worker refers to itself, so that only a collection frees its buffers
        return observed

    ours = observe_ours(subject)
    ours_in_fp32 = observe_ours(exact) if exact else None

    def observe_theirs(dtype: torch.dtype, of: Observed, error: float = 0.0, draw: int = 0) -> Observed:
        return transformers_side.observe(subject, rows, scratch, dtype, of, error, draw)

    def drawn(
        of: Observed, true: Observed, dtype: torch.dtype, error: float, rule: Callable[..., Yardstick]
    ) -> Verdict:
        """Compare with one draw of transformers' rounding, and with more before anything is called wrong."""
        draws: list[Observed] = []
        while True:
            draws.append(observe_theirs(dtype, of, error, len(draws)))
            verdict = compare(of, true, rule(draws), layers)
            is_far = len(draws) > 1 and any(row.error > yardstick.FAR * row.allowed for row in verdict.rows)
            is_far |= any(not row.ok and not row.drawn for row in verdict.rows)
            if verdict.passed or is_far or len(draws) == (1 if error else yardstick.DRAWS):
                return replace(verdict, not_compared=(*verdict.not_compared, *untrained))

    truth = observe_theirs(torch.float64, ours)
    layers = _layers(subject)
    untrained = tuple(sorted(truth.buffers & layers.keys()))
    for name in untrained:
        del layers[name]
        for observed in filter(None, (ours, ours_in_fp32)):
            observed.gradients.pop(name, None)
    for missing in (ours.gradients.keys() ^ truth.gradients.keys(), layers.keys() ^ truth.gradients.keys()):
        if missing:
            raise ConfigError(f"{model_dir}: {min(missing)} has a gradient on one side only: nothing to compare with.")
    longest_sum = max(v.shape[-1] for v in params if len(v.shape) == 2)  # in a product of the forward pass
    fp32 = partial(yardstick.fp32, terms=longest_sum, tokens=len(rows.batch.tokens))
    if ours_in_fp32 is None:
        return None, drawn(ours, truth, torch.float32, 0.0, fp32)
    truth_in_fp32 = observe_theirs(torch.float64, ours_in_fp32) if ours.choices else truth
    verdict_in_fp32 = drawn(ours_in_fp32, truth_in_fp32, torch.float32, 0.0, fp32)
    del ours_in_fp32, truth_in_fp32
    if inputs.lowering is not None:
        error = inputs.lowering.product_error(inputs.precision)
    else:
        error = inputs.recipe.product_error(inputs.precision, inputs.recipe_options)
    bf16 = partial(yardstick.bf16, product_error=error)
    return verdict_in_fp32, drawn(ours, truth, torch.bfloat16, error, bf16)


def _skipped(subject: Subject, model_dir: Path) -> list[str]:
    """Return the names of the tensors that are of other layers than those that are compared, and patterns of what is
    kept beside them, whose names may count the layers."""
    from surogate.checkpoints.base_files import names_in
    from surogate.checkpoints.formed_weights import find_formed
    from surogate.checkpoints.stored_weights import locate

    inputs, form = subject.plan.inputs, subject.run.form
    model, compared = inputs.model, _names(inputs.model.weights(inputs.dims))
    dims = model.dims(read_config(model_dir))
    others = {t.name: t for weight in model.weights(dims) for t in weight.tensors if t.name not in compared}
    if not others:
        return []
    kept = model.kept_tensors(dims)
    if form is None:
        return sorted({*others, *kept})
    names = names_in(model_dir, model, dims, model.weights(dims))
    in_files = {names.of(name): tensor for name, tensor in others.items()}
    named = (replace(tensor, name=name) for name, tensor in in_files.items())
    formed = find_formed(model_dir, locate(model_dir), form, named)
    parts = (part.name for name in formed.tensors for part in form[0].parts(in_files[name], form[1]))
    return sorted({*others, *kept, *parts})


def _names(weights: Iterable[WeightMap]) -> set[str]:
    return {tensor.name for weight in weights for tensor in weight.tensors}


def _layers(subject: Subject) -> dict[str, int]:
    """Return the layer of each trained tensor, in the order of the layers. Tensors outside of layers come first."""
    stored = {weight.param: [tensor.name for tensor in weight.tensors] for weight in subject.plan.assembly.weights}
    trained = sorted(subject.plan.assembly.trainable, key=lambda v: v.block)
    return {name: v.block for v in trained for name in stored.get(v.name, [v.name])}


def _cut(model_dir: Path, layers: int, folder: Path) -> Path:
    """Return `folder` with links to the model's files and a config.json with its first `layers` only."""
    config = read_config(model_dir)
    text = text_part(config)
    has = text.get("num_hidden_layers")
    if not isinstance(has, int) or not 1 <= layers <= has:
        raise ConfigError(f"--layers: {layers} is not from 1 to the model's num_hidden_layers, {has!r}.")
    folder.mkdir()
    for path in model_dir.iterdir():
        if path.name != "config.json":
            (folder / path.name).symlink_to(path.resolve())
    kinds = text.get("layer_types")
    cut = {"layer_types": kinds[:layers]} if isinstance(kinds, list) else {}
    whole = with_text_part(config, {**text, **cut, "num_hidden_layers": layers})
    (folder / "config.json").write_text(json.dumps(whole), encoding="utf-8")
    return folder
