"""Choice of the checkpoint that a run resumes from, and the check that it is of the same run."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from surogate_core.errors import ConfigError

from ..config.schema import DTYPE_KEYS, RECOMPUTE_KEYS
from ..data.saved_tokens import KEY, SavedTokens
from ..hub.config_json import QUANTIZATION
from ..runs.ranks import kept_rows_text
from .facts import (
    DATA,
    DATASETS,
    FILES,
    FROZEN,
    MODEL_CONFIG,
    ROWS,
    THREADS,
    TOTAL_STEPS,
    WEIGHTS,
    fact_text,
    value_text,
)
from .folders import list_checkpoints, restore_replaced, step_folder
from .manifest import DamagedCheckpoint, Manifest, read_manifest, verify_files

LAST_GOOD = "last-good"

Choice = bool | int | str
"""`resume_from_checkpoint`: false, true (the newest), a step, a checkpoint's directory, or LAST_GOOD."""

_FACTS = (
    "model",
    "from_scratch",
    "init_projections_to_zero",
    "adapter",
    "num_epochs",
    "max_steps",
    "torch_dtype",
    *DTYPE_KEYS.values(),
)
_DATA = ("datasets", "validation_datasets", "validation_split_ratio", "dataloader_num_workers", "template_date")
FOLDERS = ("output_dir", "checkpoint_dir", "overwrite_output_dir", "run_name", "log_file", "plugins")
_REPORTS = (
    "report_to",
    "logging_steps",
    "log_gpu_util",
    "numerics_report_steps",
    "push_to_hub",
    "hub_model_id",
    "hub_private",
    "sample_prompts",
    "sample_every",
    "sample_max_new_tokens",
    "sample_batch_size",
    "sample_temperature",
    "sample_top_p",
    "sample_as",
    "sample_on",
)
_SAVES = (
    *("save_strategy", "save_steps", "saves_per_epoch", "save_total_limit", "save_keep_every", "save_in_background"),
    *("resume_from_checkpoint", KEY),
)
_EVALUATIONS = (
    *("eval_strategy", "eval_steps", "evals_per_epoch", "eval_delay", "eval_on_start", "eval_samples"),
    *("load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
    *("early_stopping_patience", "early_stopping_threshold"),
)
_EXECUTION = ("launcher", "use_cuda_graphs", "check_finite", "verify_outputs")
_MEMORY = (
    "device_memory_limit",
    "host_memory_limit",
    "decoded_experts",
    "use_zero_copy",
    "use_write_combined",  # a key of older checkpoints
    "recompute",
    *RECOMPUTE_KEYS.values(),
)
_WITHOUT_EFFECT = frozenset((*_FACTS, *_DATA, *FOLDERS, *_REPORTS, *_SAVES, *_EVALUATIONS, *_EXECUTION, *_MEMORY))
"""Keys that change no bit of a resumed run, or that are compared as one of the run's `facts`."""

_NOT_COMPARED = frozenset((WEIGHTS, FILES, FROZEN, DATASETS, f"{MODEL_CONFIG}{QUANTIZATION}"))
"""Facts that may differ: those of a base are compared apart, and older checkpoints have the last one."""


@dataclass(frozen=True)
class Resumed:
    """The checkpoint that a run resumes from. All its files match its manifest."""

    directory: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        return self.manifest.step

    def is_in(self, checkpoints: Path) -> bool:
        return self.directory.resolve().parent == checkpoints.resolve()


def choose_checkpoint(checkpoints: Path, choice: Choice, source: str, notice: Callable[[str], None]) -> Resumed | None:
    """Return the checkpoint that `choice` selects, with every file verified; None: start a new run.

    `checkpoints` is the folder of the run's own checkpoints, `source` the config that errors name. Raises ConfigError
    if there is no such checkpoint, or it is damaged.
    """
    if choice is False:
        return None
    restore_replaced(checkpoints)
    complete = list_checkpoints(checkpoints)
    if choice is True or choice == LAST_GOOD:
        if not complete:
            notice(f"resume_from_checkpoint: no checkpoint in {checkpoints} yet: starting a new run")
            return None
        return _last_good(complete, source, notice) if choice == LAST_GOOD else _intact(complete[-1], source)
    directory = Path(choice) if isinstance(choice, str) else step_folder(checkpoints, choice)
    if not directory.is_dir():
        found = ", ".join(path.name for path in complete[-5:]) or "none"
        raise ConfigError(
            f"{source}: resume_from_checkpoint: there is no checkpoint {directory}. In {checkpoints}: {found}."
        )
    if list_checkpoints(directory):
        raise ConfigError(
            f"{source}: resume_from_checkpoint: {directory} is a folder of checkpoints. Name one: "
            f"{list_checkpoints(directory)[-1]}."
        )
    return _intact(directory, source)


def _intact(directory: Path, source: str) -> Resumed:
    try:
        return _verified(directory)
    except DamagedCheckpoint as damage:
        raise ConfigError(
            f"{source}: resume_from_checkpoint: the checkpoint is damaged: {damage}. "
            f"resume_from_checkpoint: {LAST_GOOD} resumes from the newest intact one."
        ) from None


def _last_good(complete: list[Path], source: str, notice: Callable[[str], None]) -> Resumed:
    for directory in reversed(complete):
        try:
            resumed = _verified(directory)
        except DamagedCheckpoint as damage:
            notice(f"{directory.name} is damaged: {damage}")
            continue
        if directory != complete[-1]:
            notice(f"{directory.name} is the newest intact checkpoint: resuming from it")
        return resumed
    raise ConfigError(
        f"{source}: resume_from_checkpoint: {LAST_GOOD}: every checkpoint in {complete[-1].parent} is damaged. "
        "resume_from_checkpoint: false starts a new run."
    )


def _verified(directory: Path) -> Resumed:
    """Return the checkpoint. Raises DamagedCheckpoint unless all its files match its manifest."""
    manifest = read_manifest(directory)
    verify_files(directory, manifest)
    return Resumed(directory, manifest)


def refuse_checkpoints(checkpoints: Path, key: str, source: str) -> None:
    """Raise ConfigError if a new run would write into a folder with checkpoints of another. `key` names the folder.

    Nothing would tell the checkpoints of the two runs apart: the next resume, and the limit on their number, would mix
    them up.
    """
    restore_replaced(checkpoints)
    if found := list_checkpoints(checkpoints):
        names = found[0].name if len(found) == 1 else f"{found[0].name} to {found[-1].name}"
        raise ConfigError(
            f"{source}: {key}: {checkpoints} holds checkpoints of an earlier run ({names}). To continue that run: "
            f"resume_from_checkpoint: true. To start a new one: another {key}, or overwrite_output_dir: true, which "
            "sets them aside and deletes nothing."
        )


def saved_tokens(resumed: Resumed) -> SavedTokens:
    """Return which token caches the checkpoint trains."""
    facts, manifest = resumed.manifest.facts, resumed.manifest
    remedy = (
        "Copy it from where it is, resume with the version that saved the checkpoint (surogate-core "
        f"{manifest.versions.get('surogate-core', 'of its time')}), or train its weights further on the tokens of now: "
        f"a new run in another output_dir, with resume_from_checkpoint: false and {_key(facts)}: {resumed.directory}."
    )
    caches = [str(each["cache"]) for each in facts.get(DATASETS, ())]
    hash = facts.get(DATA, {}).get("identity", "")
    return SavedTokens(checkpoint=str(resumed.directory), remedy=remedy, caches=caches, hash=hash)


def _key(facts: Mapping[str, Any]) -> str:
    return "adapter_path" if "adapter" in facts else "model"  # a checkpoint of an adapter holds no model


def refuse_another_run(
    resumed: Resumed,
    facts: Mapping[str, Any],
    defaults: Mapping[str, Any],
    source: str,
    ranks: int,
    batch_size: int,
    other_tokens: str = "",
) -> None:
    """Raise ConfigError naming the facts that differ from the saved run's, with both values.

    A saved run that lacks an option, because its version did not have it, has the value in `defaults`.
    `other_tokens`: why the tokens may differ. For another number of rows, it says with which accumulation `ranks` ranks
    take the saved one, in micro-batches of at most `batch_size` rows.
    """
    now = json.loads(json.dumps(facts))
    saved = {name: value for name, value in defaults.items() if name in now} | dict(resumed.manifest.facts)
    differing = [found for found in _differing(saved, now) if found[0] not in _NOT_COMPARED]
    changed = [
        f"{fact_text(fact)}: {value_text(fact, old)} (this run: {value_text(fact, new)})"
        for fact, old, new in differing
    ]
    if _known(saved, now, WEIGHTS) and saved[WEIGHTS] != now[WEIGHTS] and saved.get(FILES) == now.get(FILES):
        base = resumed.manifest.config.get("model")
        changed.append(f"{fact_text(WEIGHTS)} {saved[WEIGHTS]}, model: {base} (this run: {now[WEIGHTS]})")
    longer = any(name == TOTAL_STEPS for name, _, _ in differing)
    rows = next((old for name, old, _ in differing if name == ROWS and isinstance(old, int) and old > 0), None)
    how = f": {kept_rows_text(rows, ranks, batch_size)}" if rows else ""
    if changed:
        raise ConfigError(
            f"{source}: resume_from_checkpoint: {resumed.directory} was saved with {'; '.join(changed)}. Restore these "
            f"settings to resume{how}. To train its weights further, start a new run in another output_dir, with "
            f"resume_from_checkpoint: false and {_key(saved)}: {resumed.directory}."
            + (f" {other_tokens}" if other_tokens and any(name == DATA for name, _, _ in differing) else "")
            + (
                " Only a run with lr_scheduler_type: constant or inverse_sqrt and no cooldown can get more steps."
                if longer
                else ""
            )
        )


def another_form(resumed: Resumed, facts: Mapping[str, Any]) -> Iterator[str]:
    """Yield a line if the base's files have another form than those of the saved run.

    Weights in two forms cannot be compared, and those of one base have the same bits in the run's format.
    """
    saved = resumed.manifest.facts
    if _known(saved, facts, FILES) and saved[FILES] != facts[FILES]:
        now, then = value_text(FILES, facts[FILES]), value_text(FILES, saved[FILES])
        yield (
            f"resuming on base files in {now} (saved: {then}), which cannot be compared with those of "
            f"model: {resumed.manifest.config.get('model')}: bit-identical if both are the same base in "
            f"{saved[FROZEN]}"
        )


def _known(saved: Mapping[str, Any], now: Mapping[str, Any], name: str) -> bool:
    """Return whether both runs have the fact. Older checkpoints have none of a base."""
    return name in saved and name in now


def differences(
    resumed: Resumed, config: Mapping[str, Any], versions: Mapping[str, str], without_effect: Collection[str] = ()
) -> Iterator[str]:
    """Yield lines that say why the resumed run will not be bit-identical to an uninterrupted one.

    `without_effect`: keys of plugins, and packages, that change no bit.
    """
    changed = [
        f"{name}: {_text(new)} (saved: {_text(old)})"
        for name, old, new in changed_keys(resumed, config)
        if name not in without_effect
    ]
    changed += [
        f"{fact_text(name)} {new or 'not used'} (saved: {old or 'not used'})"
        for name, old, new in _differing(resumed.manifest.versions, versions)
        if name not in without_effect and (name != THREADS or old)  # older checkpoints do not have it
    ]
    if changed:
        yield f"resuming with {'; '.join(changed)}: not bit-identical to an uninterrupted run"


def changed_keys(resumed: Resumed, config: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """Yield (key, saved value, value now) for keys that differ and may change bits of the run."""
    for name, old, new in _differing(resumed.manifest.config, json.loads(json.dumps(config))):
        if name not in _WITHOUT_EFFECT:
            yield name, old, new


def saved_settings(resumed: Resumed, config: Mapping[str, Any]) -> str:
    """Return the keys that differ with their saved values, for the remedy of an error; "" if none differs."""
    return ", ".join(f"{name}: {_text(old)} (now {_text(new)})" for name, old, new in changed_keys(resumed, config))


def _differing(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys([*saved, *now]):
        if saved.get(name) != now.get(name):
            yield name, saved.get(name), now.get(name)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
