"""The model card of a run's output: `README.md` with the front matter that the Hugging Face hub reads."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path

from surogate_core.api import CAUSAL_LM, IMAGE_TEXT_TO_TEXT
from surogate_core.planning.plan import Plan

from ..checkpoints.adapter import ADAPTER_FOLDER
from ..checkpoints.folders import stopping_when_disk_refuses
from ..checkpoints.progress import Progress
from ..config.schema import DTYPE_KEYS, TrainConfig
from ..hub.files import find_local, looks_like_repo
from ..machine.replaced_file import replaced
from ..reporting.text import parameters_text
from ..runs.run import Run
from .load_commands import adapter_commands, model_commands

CARD = "README.md"
MARK = "<!-- Written by surogate; without this line a later run leaves the file alone. -->"

_TAGS = {CAUSAL_LM: "text-generation", IMAGE_TEXT_TO_TEXT: "image-text-to-text"}
"""The task that the hub shows, by the class that loads a model."""

_HYPERPARAMETERS = (
    "learning_rate",
    "lr_scheduler_type",
    "warmup_ratio",
    "warmup_steps",
    "cooldown_steps",
    "final_lr_fraction",
    "weight_decay",
    "max_grad_norm",
    "sequence_len",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "sample_packing",
    "loss_scale",
    "train_seed",
)


def write_card(
    run: Run, plan: Plan, repo: str, progress: Progress, versions: Mapping[str, str], stop_reason: str = ""
) -> None:
    """Write the card into the folder of the trained weights, atomically.

    A card without MARK is the user's and is kept. `repo`: the hub repository, or "". Raises RunStopped when the disk is
    full or refuses.
    """
    folder = Path(run.config.output_dir, ADAPTER_FOLDER if run.adapter else "")
    path = folder / CARD
    if path.exists() and MARK not in path.read_text(encoding="utf-8", errors="replace"):
        return
    text = model_card(run, plan, repo or run.config.resolved_run_name, progress, versions, stop_reason)
    with stopping_when_disk_refuses(path, safe_in=folder), replaced(path) as fresh:
        fresh.write_text(text, encoding="utf-8")


def model_card(
    run: Run, plan: Plan, name: str, progress: Progress, versions: Mapping[str, str], stop_reason: str = ""
) -> str:
    """Return the card's text. `name`: of the repository, or of the run.

    The front matter states no license: it follows from base model and data, and the user has to state it.
    """
    from huggingface_hub import ModelCardData

    config, chosen = run.config, run.adapter
    known = run.model.in_transformers
    base = None if config.from_scratch or not _on_hub(config.model) else config.model
    data = [entry.path for entry in config.datasets if _on_hub(entry.path)]
    front = ModelCardData(
        base_model=base,
        base_model_relation=None if base is None else "adapter" if chosen else "finetune",
        datasets=list(dict.fromkeys(data)) or None,
        library_name=chosen[0].library if chosen else "transformers" if known else None,
        pipeline_tag=_TAGS.get(run.model.loaded_by),
        tags=["surogate", *([chosen[0].name] if chosen else [])],
    )
    shown = base or Path(config.model).name  # a local path is private
    commands = adapter_commands(run, Path(name), shown) if chosen else model_commands(name, run.model.loaded_by)
    commands = commands if known else ()
    parts = [
        f"---\n{front.to_yaml()}\n---\n\n{MARK}",
        f"# {name.rpartition('/')[2]}",
        _what(run, plan, None if config.from_scratch else shown),
        _table("Results", _results(progress, bool(config.load_best_model_at_end), stop_reason)),
        _table("Hyperparameters", _hyperparameters(run, plan)),
        *(["## Use\n\n" + "\n".join(f"- {program}: `{line}`" for program, line in commands)] if commands else []),
        "## Versions\n\n" + ", ".join(f"{package} {version}" for package, version in versions.items()),
    ]
    return "\n\n".join(parts) + "\n"


def _results(progress: Progress, loads_best: bool, stop_reason: str) -> Iterator[tuple[str, str]]:
    """Yield rows of results. The validation loss is that of the weights; the best one is included if it is another."""
    yield "optimizer steps", f"{progress.step:,}"
    if stop_reason:
        yield "ended by", stop_reason
    step = progress.weights_step(loads_best)
    if progress.best and loads_best:
        yield "weights", f"after step {step:,}, the best by {progress.best.metric} ({progress.best.value:.4f})"
    yield "tokens", f"{progress.tokens:,}"
    if progress.loss is not None:
        yield "training loss (last step)", f"{progress.loss:.4f}"
    losses = [loss for _, loss, _ in progress.evaluations]
    if losses:
        loss = progress.loss_at(step)
        shown = losses[-1] if loss is None else loss
        yield "validation loss", f"{shown:.4f}"
        if min(losses) < shown:
            yield "best validation loss", f"{min(losses):.4f}"


def _on_hub(path: str) -> bool:
    return looks_like_repo(path) and find_local(path) is None


def _what(run: Run, plan: Plan, base: str | None) -> str:
    chosen, size = run.adapter, f"{parameters_text(plan.assembly.n_params)} parameters"
    if chosen:
        trained = f"{parameters_text(plan.assembly.n_trainable)} of {size} trained"
        return f"An adapter ({chosen[0].name}) of {base}, {trained}, by Surogate."
    begun = f"{base}, trained further" if base else f"{run.model.name}, trained from random weights"
    return f"{begun} ({size}), by Surogate."


def _hyperparameters(run: Run, plan: Plan) -> Iterator[tuple[str, str]]:
    config: TrainConfig = run.config
    yield "GPUs" if plan.target.device.sm else "devices", str(plan.report.devices)
    for kind in ("recipe", "optimizer", "loss"):
        yield kind, getattr(config, kind)
    for what, dtype in asdict(plan.inputs.precision).items():
        yield DTYPE_KEYS[what], dtype
    for key in _HYPERPARAMETERS:
        yield key, str(getattr(config, key))
    for (kind, _), options in run.loaded.options.items():
        if kind != "logger":
            for key, value in options.model_dump(mode="json", by_alias=True).items():
                yield key, ", ".join(map(str, value)) if isinstance(value, list) else str(value)


def _table(title: str, rows: Iterable[tuple[str, str]]) -> str:
    lines = [f"| {what} | {value.replace('|', '&#124;')} |" for what, value in rows]
    return "\n".join([f"## {title}\n", "| | |", "|---|---|", *lines])
