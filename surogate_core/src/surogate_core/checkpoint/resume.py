"""Which checkpoint a run goes on from, and whether it is one of this run."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..errors import ConfigError
from .folders import give_back_replaced, list_checkpoints
from .manifest import DamagedCheckpoint, Manifest, read_manifest, verify_files

LAST_GOOD = "last-good"

Choice = bool | int | str
"""`resume_from_checkpoint`: false, true (the newest), a step, a checkpoint's directory, or LAST_GOOD."""

_WITHOUT_EFFECT = frozenset(
    {
        *("adapter", "launcher"),  # the adapter is one of the facts that must agree
        *("model", "from_scratch", "init_projections_to_zero", "datasets", "validation_datasets"),
        *(
            "validation_split_ratio",
            "output_dir",
            "checkpoint_dir",
            "overwrite_output_dir",
            "run_name",
            "log_file",
            "report_to",
        ),
        *(
            "logging_steps",
            "save_steps",
            "save_total_limit",
            "save_in_background",
            "eval_steps",
            "resume_from_checkpoint",
            "num_epochs",
        ),
        *("max_steps", "dataloader_num_workers", "check_finite", "use_cuda_graphs", "log_gpu_util"),
        *("verify_outputs", "push_to_hub", "hub_model_id", "hub_private"),
    }
)
"""Keys that decide no bit of a run that goes on, or that a fact stands for."""


@dataclass(frozen=True)
class Resumed:
    """A checkpoint whose files are what was written."""

    directory: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.manifest.step


def choose(checkpoints: Path, choice: Choice, source: str, notice: Callable[[str], None]) -> Resumed | None:
    """The checkpoint that `choice` means, every file of it verified; None: start fresh.

    `checkpoints` is where the run's own ones lie. Raises ConfigError when there is no such one, or it is damaged.
    """
    if choice is False:
        return None
    give_back_replaced(checkpoints)
    complete = list_checkpoints(checkpoints)
    if choice is True or choice == LAST_GOOD:
        if not complete:
            notice(f"resume_from_checkpoint: no checkpoint in {checkpoints} yet: a fresh start")
            return None
        return _last_good(complete, source, notice) if choice == LAST_GOOD else _verified(complete[-1], source)
    directory = Path(choice) if isinstance(choice, str) else checkpoints / f"step_{choice:08d}"
    if not directory.is_dir():
        there = ", ".join(path.name for path in complete[-5:]) or "none"
        raise ConfigError(
            f"{source}: resume_from_checkpoint: there is no checkpoint {directory}. In {checkpoints}: {there}."
        )
    if list_checkpoints(directory):
        raise ConfigError(
            f"{source}: resume_from_checkpoint: {directory} is a folder of checkpoints. Name one: "
            f"{list_checkpoints(directory)[-1]}."
        )
    return _verified(directory, source)


def _verified(directory: Path, source: str) -> Resumed:
    try:
        manifest = read_manifest(directory)
        verify_files(directory, manifest)
    except DamagedCheckpoint as damage:
        raise ConfigError(
            f"{source}: resume_from_checkpoint: the checkpoint is damaged: {damage}. "
            f"resume_from_checkpoint: {LAST_GOOD} goes on from the newest one that is whole."
        ) from None
    return Resumed(directory, manifest)


def _last_good(complete: list[Path], source: str, notice: Callable[[str], None]) -> Resumed:
    for directory in reversed(complete):
        try:
            manifest = read_manifest(directory)
            verify_files(directory, manifest)
        except DamagedCheckpoint as damage:
            notice(f"{directory.name} is damaged: {damage}")
            continue
        if directory != complete[-1]:
            notice(f"{directory.name} is the newest checkpoint that is whole: the run goes on from there")
        return Resumed(directory, manifest)
    raise ConfigError(
        f"{source}: resume_from_checkpoint: {LAST_GOOD}: every checkpoint in {complete[-1].parent} is damaged. "
        "resume_from_checkpoint: false starts a new run."
    )


def is_of(resumed: Resumed | None, checkpoints: Path) -> bool:
    """Whether a run goes on where it was saved, in `checkpoints`."""
    return resumed is not None and resumed.directory.resolve().parent == checkpoints.resolve()


def refuse_checkpoints(checkpoints: Path, key: str, source: str) -> None:
    """Raise ConfigError for a folder of another run's checkpoints. `key` is what names the folder.

    Old and new would be told apart by nothing: the next resume, and the limit on their number, would take the ones for
    the others.
    """
    give_back_replaced(checkpoints)
    if there := list_checkpoints(checkpoints):
        named = there[0].name if len(there) == 1 else f"{there[0].name} to {there[-1].name}"
        raise ConfigError(
            f"{source}: {key}: {checkpoints} holds checkpoints of an earlier run ({named}). To go on with that run: "
            f"resume_from_checkpoint: true. To begin anew: another {key}, or overwrite_output_dir: true, which sets "
            "them aside and deletes nothing."
        )


def refuse_another_run(resumed: Resumed, facts: Mapping[str, Any], source: str) -> None:
    """Raise ConfigError naming what this run has differently from the saved one, with both values."""
    saved, now = resumed.manifest.facts, json.loads(json.dumps(facts))
    key = "adapter_path" if "adapter" in saved else "model"  # a checkpoint of an adapter holds no model
    told = [f"{name}: {_shown(was)} (this run: {_shown(is_)})" for name, was, is_ in _differing(saved, now)]
    if told:
        raise ConfigError(
            f"{source}: resume_from_checkpoint: {resumed.directory} was saved with {'; '.join(told)}. Set it as it "
            "was, or start a new run in another output_dir, with resume_from_checkpoint: false; its weights can be "
            f"trained on with {key}: {resumed.directory}."
        )


def differences(
    resumed: Resumed, config: Mapping[str, Any], versions: Mapping[str, str], without_effect: Collection[str] = ()
) -> Iterator[str]:
    """Lines that tell why the run will not have the bits that it would have had without the stop.

    `without_effect`: keys of plugins that decide no bit.
    """
    now = json.loads(json.dumps(config))
    changed = [
        f"{name}: {_shown(is_)} (saved: {_shown(was)})"
        for name, was, is_ in _differing(resumed.manifest.config, now)
        if name not in _WITHOUT_EFFECT and name not in without_effect
    ]
    changed += [
        f"{name} {is_ or 'absent'} (saved: {was or 'absent'})"
        for name, was, is_ in _differing(resumed.manifest.versions, versions)
    ]
    if changed:
        yield f"resumes with {'; '.join(changed)}: not the bits of a run that never stopped"


def _differing(saved: Mapping[str, Any], now: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in dict.fromkeys([*saved, *now]):
        if saved.get(name) != now.get(name):
            yield name, saved.get(name), now.get(name)


def _shown(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
