"""Rules of the four tools that a table cannot say."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from . import entries
from .conversion import Conversion, shown
from .settings import Wish

_KERNELS = ("liger", "cut_cross", "cutcross")


def _axolotl(c: Conversion) -> None:
    root = c.root
    for key, ours in (
        ("datasets", "datasets"),
        ("pretraining_dataset", "datasets"),
        ("test_datasets", "validation_datasets"),
    ):
        kind = "completion" if key == "pretraining_dataset" else None
        if isinstance(root.look(key), str):
            c.entries.setdefault(ours, []).append({"path": root.take(key), "type": "text"})
        for node in root.below(key).items():
            entry, said = entries.axolotl(node, kind, c.loss)
            for line in said:
                c.differs(f"{key}.{node.place[-1]}.type", line)
            c.entries.setdefault(ours, []).append(entry)
    if any(entry.get("type") == "weighted" for found in c.entries.values() for entry in found):
        c.settings.ask("loss", Wish("tokens"))
        c.settings.ask("tokens_weights", Wish(True))
    plugins = [str(name) for name in root.look("plugins") or ()]
    others = [name for name in plugins if not any(word in name.lower() for word in _KERNELS)]
    if others:
        root.settle("plugins", "missing", f"{', '.join(others)}: plugins of axolotl")
    else:
        root.settle("plugins", "unneeded", "kernels are fused without a plugin")
    _zero_level(c)
    _warmup(c)
    _schedule(c, "lr_scheduler")


def _trl(c: Conversion) -> None:
    _rows(c, "dataset_train_split")
    root = c.root
    asked = bool(root.take("use_peft")) or bool({"get_peft_model", "LoraConfig"} & c.source.words)
    if asked:
        c.ask("lora", True, "use_peft")
    _zero_level(c)
    _warmup(c)
    _schedule(c)
    scored = {"assistant_only_loss", "completion_only_loss", "response_template"} & {*c.source.names}
    if not scored and not c.loss:
        c.settings.ask("loss_scale", Wish("all"))
        said = "TRL trains every token of conversations and texts, so loss_scale is all. Of rows with prompt and "
        c.differs("loss_scale", f"{said}completion it trains the completion: set loss_scale: default for these")


def _unsloth(c: Conversion) -> None:
    if "unsloth-cli.py" in c.source.words:  # it has defaults of its own, and puts rows into Alpaca's prompt
        own = {
            "load_in_4bit": ("qlora_bnb", False),
            "warmup_steps": ("warmup_steps", 5),
            "max_steps": ("max_steps", 400),
        }
        for key in own.keys() - {*c.source.names}:
            c.settings.ask(own[key][0], Wish(own[key][1], weak=True))
            c.added.append(own[key][0])
    _rows(c, "dataset_split", "alpaca" if "unsloth-cli.py" in c.source.words else None)
    root = c.root
    full = root.take("training_type") == "full"
    full = bool(root.take("full_finetuning")) or full
    c.ask("lora", not full, "training_type", "full_finetuning")
    _zero_level(c)
    _warmup(c)
    _schedule(c)
    for key in ("model_name", "model"):
        model = root.look(key)
        plain = re.sub(r"-(unsloth-)?bnb-4bit$", "", str(model)) if model else None
        if plain != model and model:
            c.settings.ask("model", Wish(plain, root.open(key)))
            root.take(key)
            c.differs(key, f"{model}: stored in 4 bits by bitsandbytes; the 16-bit model is read instead")
    if not full and "training_type" in c.source.names and "lora_r" not in c.source.names:
        c.settings.ask("lora_rank", Wish(64))  # the default of `unsloth train`, not of get_peft_model
        c.added.append("lora_rank")


def _llamafactory(c: Conversion) -> None:
    root = c.root
    if "lora" not in c.settings:
        c.settings.ask("lora", Wish(True))
    lora = c.settings.value("lora")
    folder = Path(root.take("dataset_dir") or "data")
    beside = [place for place in (folder, c.path.parent / folder) if (place / "dataset_info.json").is_file()]
    samples = root.take("max_samples")
    for key, ours in (("dataset", "datasets"), ("eval_dataset", "validation_datasets")):
        given, leaves = root.look(key), root.open(key)
        if not given:
            continue
        root.take(key)
        names = [str(name).strip() for name in (given if isinstance(given, list) else str(given).split(","))]
        place = (beside or [folder])[0]
        found, unknown, more = entries.llamafactory(names, root, place, c.loss)
        c.leaves += more
        for name in unknown:
            for leaf in leaves:
                file = place / "dataset_info.json"
                leaf.settle("missing", f"{name}: is not in {file}: set its path, type and columns")
        c.entries[ours] = [entry | ({"samples": samples} if samples else {}) for entry in found]
    if lora and "lora_alpha" not in c.source.names:
        c.settings.ask("lora_alpha", Wish(2 * (root.look("lora_rank") or 8)))
        c.added.append("lora_alpha")
    _zero_level(c)
    _warmup(c)
    _schedule(c)


OWN: Mapping[str, Callable[[Conversion], None]] = {
    "axolotl": _axolotl,
    "trl": _trl,
    "unsloth": _unsloth,
    "llamafactory": _llamafactory,
}


def _rows(c: Conversion, split: str, kind: str | None = None) -> None:
    """Set the entries of TRL's and Unsloth's keys and scripts. split: the key of the split. kind: the usual format."""
    root, source = c.root, c.source
    changed = any(leaf.table == "calls" and leaf.place[0] in ("map", "to_sharegpt") for leaf in c.leaves)
    held = [rows.share for rows in source.trained or () if rows.share]
    kind = root.take("format_type") or kind
    column = root.take("dataset_text_field") if "dataset_text_field" in root else None
    test = root.look("dataset_test_split")
    evaluates = root.look("eval_strategy") not in (None, False, "no")
    valid = [] if held else [entries.loaded(root, rows) for rows in source.evaluated]
    found = [entries.loaded(root, rows) for rows in source.trained or ()] + entries.hugging_face(root, split)
    kinds: Mapping[str, dict[str, Any]] = {"alpaca": entries.ALPACA, "raw": {"type": "text"}}
    kinds = {**kinds, **{name: {"type": "conversation"} for name in ("chatml", "sharegpt", "conversational")}}
    typed: dict[str, Any] = dict(kinds.get(str(kind or ""), {}))
    if kind and not typed:
        for leaf in [leaf for leaf in c.leaves if leaf.place == ("format_type",)]:
            leaf.settle("missing", f"{kind}: set the type of the entry")
    if not typed and column and not c.loss:
        typed = {"type": "text"} | ({} if column == "text" else {"text_field": column})
    if c.loss:
        typed = {"type": "labelled" if c.loss == "kto" else "preference"}
        c.differs("datasets", "text in the columns is what user and assistant say, in the model's chat template; "
                              "TRL takes it as it is: set text_as: text in the entry for that")  # fmt: skip
    found = [entry for entry in found if entry["path"]]  # the path of another is computed, and named
    valid = [entry for entry in valid if entry["path"]]
    for entry in (*found, *valid):
        entry |= typed if not changed or c.loss else {}
    valid += [{"path": value} for value in [root.take("eval_dataset")] if isinstance(value, str)]
    if evaluates and found and not valid and not held and not c.script:
        first = {key: value for key, value in found[0].items() if key != "samples"}
        valid = [{**first, "split": test or "test"}]
    root.settle("dataset_test_split", "converted" if valid else "unneeded", "" if valid else "nothing is evaluated")
    if found:
        c.entries["datasets"] = found
    if valid:
        c.entries["validation_datasets"] = valid
    if held:
        c.settings.ask("validation_split_ratio", Wish(held[0]))
    models = [leaf.value for leaf in c.leaves if leaf.place in (("model_name",), ("model",), ("model_name_or_path",))]
    for leaf in root.open("tokenizer_name_or_path"):
        if leaf.value in models:
            leaf.settle("unneeded", "the tokenizer of the model is used")


def _zero_level(c: Conversion) -> None:
    """Set the stage that the name of a config file of DeepSpeed or Accelerate says."""
    for key in ("deepspeed", "accelerate_config"):
        value = c.root.look(key)
        if not isinstance(value, str) or not value:
            continue
        stage = re.search(r"(?:zero|z|ds|stage)[-_]?([0-3])", value, re.IGNORECASE)
        if stage is None:
            c.root.settle(key, "missing", f"{shown(value)}: set zero_level to the stage in this file (1, 2 or 3)")
            continue
        if stage[1] != "0":
            c.ask("zero_level", int(stage[1]), key)
            c.differs(key, f"{shown(value)}: zero_level {stage[1]}; offloading is set by offload_* keys")
        c.root.take(key)
    for leaf in [leaf for leaf in c.leaves if leaf.place == ("launcher", "config_file") and leaf.fate is None]:
        stage = re.search(r"(?:zero|stage)[-_]?([1-3])", str(leaf.value), re.IGNORECASE)
        if stage is not None:
            c.settings.ask("zero_level", Wish(int(stage[1]), [leaf]))
            leaf.settle("converted")
            c.differs(
                leaf.name, f"{shown(leaf.value)}: zero_level {stage[1]}, by its name; its other keys are not read"
            )


def _warmup(c: Conversion) -> None:
    """Take `warmup_steps` below 1 as a part of the steps."""
    steps, leaves = c.root.look("warmup_steps"), c.root.open("warmup_steps")
    if isinstance(steps, bool) or not isinstance(steps, int | float):
        return
    c.root.take("warmup_steps")
    if 0 < steps < 1:
        c.settings.ask("warmup_ratio", Wish(steps, leaves))
    else:
        c.settings.ask("warmup_steps", Wish(int(steps), leaves, weak=steps == 0))


_WITH_SETTINGS = ("cosine_with_restarts", "polynomial", "inverse_sqrt", "reduce_lr_on_plateau")
"""Schedules that have the same settings here."""


def _schedule(c: Conversion, key: str = "lr_scheduler_type") -> None:
    """Take the settings of a schedule as they are, or its smallest rate as a part of the rate."""
    leaves = c.root.open("lr_scheduler_kwargs")
    if leaves and c.root.look(key) in _WITH_SETTINGS and isinstance(c.root.look("lr_scheduler_kwargs"), dict):
        c.settings.ask("lr_scheduler_kwargs", Wish(c.root.take("lr_scheduler_kwargs"), leaves))
        return
    node = c.root.below("lr_scheduler_kwargs")
    least, rate = node.look("min_lr"), c.root.look("learning_rate") or c.tool.defaults.get("learning_rate", (None,))[0]
    if isinstance(least, int | float) and not isinstance(least, bool) and isinstance(rate, int | float) and rate:
        c.settings.ask("final_lr_fraction", Wish(round(least / rate, 6), node.open("min_lr")))
        node.take("min_lr")
