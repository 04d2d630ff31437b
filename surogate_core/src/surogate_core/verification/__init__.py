"""`surogate verify`: compares a run's model and recipe with transformers, on this machine, before the run.

A few rows go forward and backward through the run's own programs, executor and kernels, and through transformers in
float64 on the same weights, which is the truth. How far ours may be from it follows the error that transformers itself
makes in the run's precision. A run that computes in less than fp32 is compared twice: the model in fp32, which shows
errors that are smaller than the rounding of the run, and the run itself.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .. import run
from ..api import WeightMap
from ..config.load import Mode
from ..errors import ConfigError
from ..hub.config_json import read_config
from ..hub.files import CONFIG_FILES, TOKENIZER_FILES, WEIGHT_FILES, resolve_model_dir
from ..planning.plan import plan_run
from .needs import Needs, estimate, refuse_unless_it_fits
from .programs import WithoutDropout, computes_in_fp32, in_fp32, refuse_training_only
from .subject import Subject
from .tokens import Chosen, from_data, random_batch
from .verdict import Row, Verdict, compare

if TYPE_CHECKING:
    from ..planning.inputs import PlanInputs
    from .observed import Observed

__all__ = ["Row", "Verdict", "Verification", "verify"]

DEFAULT_LENGTH = 512
"""Tokens of a row, unless the run's rows are shorter: what transformers keeps for its backward pass fits beside it."""


@dataclass(frozen=True)
class Verification:
    """What was compared, on what, and the results.

    tokens: a description of them. device: where ours ran. left_out: kinds of ops for training alone, such as dropout,
    that were off on both sides. in_fp32: the comparison of the model in fp32, where the run computes in less.
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

    @property
    def verdicts(self) -> tuple[Verdict, ...]:
        """In the order in which to read them: an error of the model is an error of the run too."""
        return (self.in_fp32, self.verdict) if self.in_fp32 else (self.verdict,)

    @property
    def passed(self) -> bool:
        return all(verdict.passed for verdict in self.verdicts)

    @property
    def first_wrong(self) -> Row | None:
        """Where to look first."""
        return next((verdict.first_wrong for verdict in self.verdicts if not verdict.passed), None)


def verify(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    rows: int = 2,
    length: int | None = None,
    layers: int | None = None,
    random_tokens: bool = False,
    mode: Mode = "train",
    notice: Callable[[str], None] = print,
) -> Verification:
    """Compare the model and recipe of a YAML file with transformers on this machine. Writes nothing.

    `rows` rows of `length` tokens (at most 512 of the run's own by default), of the run's data, or random ones where it
    names none or `random_tokens` says so; of a model cut to its first `layers`, if that is given. `mode`: the verb
    whose defaults the run takes. Raises ConfigError for what cannot be compared, or does not fit.
    """
    loaded = run.load(path, overrides, mode)
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

        def planned(revise: Callable[[PlanInputs], PlanInputs], **more: str) -> Subject:
            settings = [f"{key}={json.dumps(value)}" for key, value in (changes | more).items()]
            smaller = run.load(path, [*overrides, *settings], mode)
            opened = run.open_run(smaller, files)
            return Subject(opened, plan_run(opened, run.device_of_torch(run.usable_device()), 1, revise))

        no_dropout = WithoutDropout()
        subject = planned(no_dropout)
        model = subject.plan.inputs.model
        if not model.in_transformers:
            raise ConfigError(f"model: transformers has no {model.name}, as its plugin says: nothing to compare with.")
        refuse_training_only(subject)
        exact = None if computes_in_fp32(subject.plan.inputs) else planned(in_fp32, kernels="allow_reference")
        if config.datasets and not random_tokens:
            chosen = from_data(run.tokenize(loaded, notice), subject.plan.inputs, config.train_seed)
        else:
            chosen = random_batch(subject.plan.inputs, config.train_seed)
        needed = estimate(subject, exact, chosen)
        refuse_unless_it_fits(subject, needed)
        with _only_new_objects_collected():
            meaning, verdict = _compare(subject, exact, chosen, model_dir, scratch, notice)
    precision = subject.plan.inputs.precision
    return Verification(
        model=config.model + (f", its first {layers} layers" if layers else ""),
        recipe=config.recipe + "".join(f" with {adapter.name}" for adapter, _ in subject.plan.inputs.adapters),
        dtypes=f"model {precision.model}, products {precision.matmul}, their gradients {precision.gradient}",
        device=subject.plan.report.device.title,
        weights="random, as a run from scratch begins" if config.from_scratch else "of the checkpoint",
        tokens=chosen.told,
        left_out=tuple(sorted(no_dropout.left_out)),
        needs=needed,
        in_fp32=meaning,
        verdict=verdict,
    )


def _compare(
    subject: Subject,
    exact: Subject | None,
    chosen: Chosen,
    model_dir: Path,
    scratch: Path,
    notice: Callable[[str], None],
) -> tuple[Verdict | None, Verdict]:
    """(the comparison in fp32 where the run computes in less, that of the run). One model at a time is in memory.

    Ours goes first, since from scratch it draws the weights.
    """
    import torch

    from . import ours, theirs, yardstick

    model, dims = subject.plan.inputs.model, subject.plan.inputs.dims
    skipped = sorted(_names(model.weights(model.dims(read_config(model_dir)))) - _names(model.weights(dims)))
    stored = {v.name: v.dtype for v in subject.plan.assembly.declared if v.role == "param"}

    def our_side(of: Subject) -> Observed:
        observed = ours.observe(of, chosen, scratch, skipped, stored, notice)
        gc.collect()  # a watched worker refers to itself: its buffers would stay
        return observed

    mine = our_side(subject)
    mine_in_fp32 = our_side(exact) if exact else None
    truth = theirs.observe(subject, chosen, scratch, torch.float64)
    layers = _layers(subject)
    for missing in (mine.gradients.keys() ^ truth.gradients.keys(), layers.keys() ^ truth.gradients.keys()):
        if missing:
            raise ConfigError(f"{model_dir}: {min(missing)} has a gradient on one side only: nothing to compare with.")
    beside = theirs.observe(subject, chosen, scratch, torch.float32)
    fp32 = yardstick.fp32(beside, _longest_sum(subject), len(chosen.batch.tokens))
    if mine_in_fp32 is None:
        return None, compare(mine, truth, fp32, layers)
    meaning = compare(mine_in_fp32, truth, fp32, layers)
    del beside, fp32, mine_in_fp32
    bf16 = yardstick.bf16(theirs.observe(subject, chosen, scratch, torch.bfloat16))
    return meaning, compare(mine, truth, bf16, layers)


@contextmanager
def _only_new_objects_collected() -> Iterator[None]:
    """Spares gc.collect() the objects of imported libraries: 2 s each time where transformers is imported."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _longest_sum(subject: Subject) -> int:
    """Terms of the longest sum in a product of the forward pass: the most columns of a weight."""
    return max(v.shape[-1] for v in subject.plan.assembly.declared if v.role == "param" and len(v.shape) == 2)


def _names(weights: Iterable[WeightMap]) -> set[str]:
    return {tensor.name for weight in weights for tensor in weight.tensors}


def _layers(subject: Subject) -> dict[str, int]:
    """Each trained tensor's layer, in the order of the layers: first what is outside."""
    stored = {weight.param: [tensor.name for tensor in weight.tensors] for weight in subject.plan.assembly.weights}
    trained = sorted(subject.plan.assembly.trainable, key=lambda v: v.block)
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
