"""From the keys of another trainer to a config of Surogate, with a note on each key that is not simply renamed."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surogate_core.api import ConfigError

from . import entries
from .reading import Source, read
from .rules import TOOLS, Rule, Tool, tool

_OFF: Sequence[Any] = (None, False, "", "none", "None", "no", [], {})
"""Values with which a key asks for nothing."""

_ORDER = (
    *("model", "adapter", "lora", "adapter_path", "output_dir", "run_name", "datasets", "validation_datasets"),
    *("validation_split_ratio", "loss_scale", "truncation_strategy", "sample_packing", "sequence_len"),
    *("per_device_train_batch_size", "gradient_accumulation_steps", "num_epochs", "max_steps", "learning_rate"),
    *("lr_scheduler_type", "warmup_ratio", "warmup_steps", "optimizer", "weight_decay"),
)
_SIGN = 5
"""The weight of a key or word that only one tool has, beside a key that the tool knows."""


@dataclass
class Converted:
    """A converted config. The notes are (key, sentence).

    differs   keys that mean something else here, or were set for another default
    missing   keys without a counterpart: what they asked for is lost
    unneeded  keys that are not needed here
    added     keys that were not in the file: the tool's own defaults
    """

    tool: Tool
    config: dict[str, Any] = field(default_factory=dict)
    differs: list[tuple[str, str]] = field(default_factory=list)
    missing: list[tuple[str, str]] = field(default_factory=list)
    unneeded: list[tuple[str, str]] = field(default_factory=list)
    added: list[str] = field(default_factory=list)


def convert(path: Path, name: str | None = None) -> Converted:
    """Convert a file of the tool `name`, by default the one whose keys it has.

    Raises ConfigError for a file that cannot be read, is of no tool, or asks for training that is not converted.
    """
    source = read(path)
    chosen = tool(name) if name else recognised(path, source)
    return _Conversion(path, source, chosen).run()


def recognised(path: Path, source: Source) -> Tool:
    """Return the tool whose keys a file has."""
    if "unsloth" in source.words:  # its scripts have the keys of TRL too
        return tool("unsloth")
    tables = [tool(name) for name in TOOLS]
    if {"model", "datasets"} <= source.keys.keys():  # other tools call them base_model, dataset
        raise ConfigError(f"{path}: has the keys of a config of Surogate. Train it as it is: surogate train {path}")
    words = source.words | source.keys.keys()
    score = {t.name: sum(key in t.keys for key in source.keys) + _SIGN * len(words & {*t.signs}) for t in tables}
    best = sorted(score, key=lambda name: -score[name])
    titles = ", ".join(t.title for t in tables)
    if score[best[0]] == 0:
        raise ConfigError(f"{path}: has no key of {titles}. Give the config of a run.")
    if score[best[0]] == score[best[1]]:
        raise ConfigError(f"{path}: may be of {best[0]} or {best[1]}. Say which: --from {best[0]}")
    found = tool(best[0])
    unknown = [key for key in source.keys if key not in found.keys]
    if not words & {*found.signs} and 2 * len(unknown) > len(source.keys):
        raise ConfigError(
            f"{path}: most of its keys are of none of {titles}: {', '.join(unknown[:5])}. Other tools are not "
            f"converted. If it is of one of these, say which: --from {found.name}"
        )
    return found


class _Conversion:
    def __init__(self, path: Path, source: Source, chosen: Tool) -> None:
        self._path, self._source, self._keys = path, source, dict(source.keys)
        self._done = Converted(chosen)
        self._config = self._done.config
        self._own: dict[str, Callable[[], None]] = {
            "axolotl": self._axolotl,
            "trl": self._trl,
            "llamafactory": self._llamafactory,
            "unsloth": self._unsloth,
        }

    def run(self) -> Converted:
        self._own[self._done.tool.name]()
        for key, value in self._keys.items():
            self._key(key, value)
        for key, line in self._source.computed.items():
            rule = self._done.tool.keys.get(key)
            if rule is None or not (rule.unneeded or key in self._source.keys):
                where = rule.by if key == "formatted" and rule else "is computed by the script"
                self._missing(key, f"line {line}: {where}" + (f"; set {rule.to}" if rule and rule.to else ""))
        self._adapter()
        self._defaults()
        if "gpus" not in self._config and "zero_level" not in self._config:
            rows = self._config["per_device_train_batch_size"] * self._config["gradient_accumulation_steps"]
            said = (
                f"one, so a step trains {rows} rows of {self._config['sequence_len']} tokens; with N it trains N times"
            )
            self._differs("gpus", f"{said} as many. Set gpus: N, or start by torchrun, as the launch command did")
        ordered = [key for key in _ORDER if key in self._config]
        self._done.config = {key: self._config[key] for key in dict.fromkeys((*ordered, *self._config))}
        return self._done

    # ------------------------------------------------------------------------------------------------- one key

    def _key(self, key: str, value: Any) -> None:
        rule = self._done.tool.keys.get(key)
        if rule is None:
            if value not in _OFF:
                self._missing(key, f"{_shown(value)}: is unknown to surogate convert")
            return
        if rule.unneeded:
            self._done.unneeded.append((key, rule.unneeded))
        elif rule.missing or rule.by:
            if value not in _OFF:
                self._missing(key, f"{_shown(value)}: {rule.missing or rule.by}")
        elif value is None:
            return
        elif rule.sets and not rule.to:
            if value not in _OFF:
                self._set(key, dict(rule.sets), rule)
        else:
            self._renamed(key, value, rule)

    def _renamed(self, key: str, value: Any, rule: Rule) -> None:
        if rule.only == "count" and isinstance(value, float) and value.is_integer():
            value = int(value)
        wrong = {"count": lambda: not isinstance(value, int), "fraction": lambda: not 0 <= value < 1}
        if rule.only and (isinstance(value, str | list) or wrong[rule.only]()):
            what = "a whole number" if rule.only == "count" else "a part below 1"
            self._missing(key, f"{_shown(value)}: {rule.to} is {what}")
            return
        if rule.values:
            chosen = [str(item).lower() for item in value] if isinstance(value, list) else [str(value).lower()]
            found = [rule.values.get(word) for word in chosen]
            if None in found or not found:
                if isinstance(value, list) or (rule.to == "lora_target_modules" and _is_list(value)):
                    self._set(key, {rule.to: _listed(value)}, rule)
                elif value not in _OFF:
                    have = dict.fromkeys(v if isinstance(v, str) else v.get(rule.to) for v in rule.values.values())
                    said = f"; {rule.to} may be {', '.join(map(str, filter(None, have)))}" if rule.to else ""
                    self._missing(key, f"{_shown(value)}: is not built{said}")
                return
            value = found[0] if len(found) == 1 else found
            if value == {}:
                self._done.unneeded.append((key, f"{_shown(chosen[0])} is the only one"))
                return
        elif rule.to in ("lora_target_modules", "lora_target_parameters", "lora_modules_to_save"):
            value = _listed(value)
        changed = value if isinstance(value, Mapping) and rule.values else {rule.to: value}
        self._set(key, {**changed, **(rule.sets if value not in _OFF else {})}, rule)

    def _set(self, key: str, changes: Mapping[str, Any], rule: Rule) -> None:
        for ours, value in changes.items():
            if ours in self._config and self._config[ours] != value and ours != "sample_packing":
                self._differs(key, f"{ours} is {_shown(value)} by this key, {_shown(self._config[ours])} by another")
            self._config[ours] = value if ours != "sample_packing" else bool(value or self._config.get(ours))
        if rule.says and any(value not in _OFF for value in changes.values()):
            self._differs(key, rule.says)

    def _differs(self, key: str, said: str) -> None:
        self._done.differs.append((key, said))

    def _missing(self, key: str, said: str) -> None:
        self._done.missing.append((key, said))

    def _take(self, *names: str) -> Any:
        """Take keys out; return the value of the first that is not off."""
        found = [self._keys.pop(name, None) for name in names]
        return next((value for value in found if value not in _OFF), None)

    # ------------------------------------------------------------------------------------- what several tools have

    def _adapter(self) -> None:
        """Rename the keys of LoRA for DoRA, and take them out of runs that train all weights."""
        config = self._config
        if config.get("adapter") == "dora":
            config.pop("lora", None)
            for key in [key for key in config if key.startswith("lora_") and key != "lora_dtype"]:
                value = config.pop(key)
                ours = key.replace("lora_", "dora_")
                if ours in ("dora_rank", "dora_alpha", "dora_use_rslora", "dora_target_modules"):
                    config[ours] = value
                elif value not in (0, False, None):
                    self._missing(key, f"{_shown(value)}: DoRA has no such key")
        elif not config.get("lora"):
            for key in [key for key in config if key.startswith(("lora_", "qlora_"))]:
                self._done.unneeded.append((key, "no adapter is trained"))
                del config[key]

    def _defaults(self) -> None:
        trains_adapter = bool(self._config.get("lora"))
        for key, value in {**self._done.tool.defaults, **(self._done.tool.adapter if trains_adapter else {})}.items():
            known = key in self._config or (key.startswith("qlora") and not trains_adapter)
            if key == "validation_split_ratio" and "validation_datasets" in self._config:
                continue
            if not known and not (key == "num_epochs" and self._config.get("max_steps", -1) > 0):
                self._config[key] = value
                self._done.added.append(key)
        if self._config.get("report_to") == "none":
            del self._config["report_to"]

    def _zero_level(self) -> None:
        value = self._take("deepspeed")
        if value is None:
            return
        stage = re.search(r"(?:zero|z|ds|stage)[-_]?([0-3])", str(value), re.I)
        if stage is None:
            self._missing("deepspeed", f"{_shown(value)}: set zero_level to the stage in this file (1, 2 or 3)")
        elif stage[1] != "0":
            self._config["zero_level"] = int(stage[1])
            self._differs("deepspeed", f"{_shown(value)}: zero_level {stage[1]}; offloading is set by offload_* keys")

    def _warmup(self) -> None:
        steps = self._keys.pop("warmup_steps", None)
        if isinstance(steps, float) and 0 < steps < 1:
            self._config["warmup_ratio"] = steps
        elif steps is not None:
            self._config["warmup_steps"] = int(steps)

    def _template(self, *names: str) -> None:
        template = self._take(*names)
        if template not in (None, "tokenizer_default", "default", "empty"):
            said = "the model's own chat template is used. If this is another, put chat_template.jinja into its folder"
            self._differs(names[0], f"{_shown(template)}: {said}")

    def _refuse(self, what: str) -> None:
        raise ConfigError(
            f"{self._path}: {what} is not converted, but supervised fine-tuning and pre-training are. For preference "
            "training write a config by docs/preference.md (loss: dpo, orpo or simpo)."
        )

    def _formatted(self) -> bool:
        return "formatted" in self._source.computed

    # ---------------------------------------------------------------------------------------------- the four tools

    def _axolotl(self) -> None:
        if rl := self._take("rl"):
            self._refuse(f"rl: {rl}")
        if self._take("reward_model", "process_reward_model"):
            self._refuse("reward_model")
        for key, ours in (
            ("datasets", "datasets"),
            ("pretraining_dataset", "datasets"),
            ("test_datasets", "validation_datasets"),
        ):
            given = self._take(key)
            rows = given if isinstance(given, list) else [{"path": given}] if isinstance(given, str) else [given]
            kind = {"type": "completion"} if key == "pretraining_dataset" else {}
            found = [
                entries.axolotl(f"{key}.{n}", {**kind, **row}, self._differs, self._missing)
                for n, row in enumerate(rows if given else ())
            ]
            if found:
                self._config.setdefault(ours, []).extend(found)
        kind = self._take("adapter")
        if kind in ("lora", "qlora"):
            self._config["lora"] = True
        elif kind is not None:
            self._missing("adapter", f"{kind}: set adapter: lora or dora")
        others = [p for p in self._take("plugins") or () if "liger" not in p.lower() and "cut_cross" not in p.lower()]
        for plugin in others:
            self._missing("plugins", f"{plugin}: is a plugin of axolotl")
        tokens = self._take("special_tokens") or {}
        if "pad_token" in tokens:
            self._done.unneeded.append(("special_tokens", "padding is never read"))
        if special := {name: token for name, token in tokens.items() if name != "pad_token"}:
            self._missing("special_tokens", f"{_shown(special)}: {self._done.tool.keys['special_tokens'].missing}")
        self._template("chat_template", "chat_template_jinja")
        self._zero_level()
        if not self._keys.keys() & {"warmup_steps", "warmup_ratio"}:
            self._config["warmup_ratio"] = 0.03
            self._differs("warmup_ratio", "is not set: axolotl warms up over 3% of the steps, but at most 100")

    def _trl(self) -> None:
        command = self._take("command")
        if command not in (None, "sft"):
            self._refuse(f"trl {command}")
        evaluates = self._keys.get("eval_strategy") not in _OFF
        test_split = self._keys.pop("dataset_test_split", "test")
        self._hugging_face()
        if evaluates and self._config.get("datasets"):
            first = {key: value for key, value in self._config["datasets"][0].items() if key != "samples"}
            self._config["validation_datasets"] = [{**first, "split": test_split}]
        if self._take("use_peft") or "get_peft_model" in self._source.words or "LoraConfig" in self._source.words:
            self._config["lora"] = True
        self._template("chat_template_path")
        self._warmup()
        self._zero_level()
        if not self._keys.keys() & {"assistant_only_loss", "completion_only_loss"}:
            self._config["loss_scale"] = "all"
            said = "TRL trains every token of conversations and texts, so loss_scale is all. Of rows with prompt and "
            self._differs("loss_scale", f"{said}completion it trains the completion: set loss_scale: default for these")

    def _unsloth(self) -> None:
        if "unsloth-cli.py" in self._source.words:  # it has defaults of its own, and puts rows into Alpaca's prompt
            own = {"load_in_4bit": False, "format_type": "alpaca", "warmup_steps": 5, "max_steps": 400}
            self._keys = {**own, **self._keys}
        self._hugging_face()
        kind = self._take("training_type")
        full = kind == "full" or self._take("full_finetuning")
        self._config["lora"] = not full
        self._template("chat_template")
        self._warmup()
        if model := self._take("model_name", "model"):
            plain = re.sub(r"-(unsloth-)?bnb-4bit$", "", str(model))
            self._config["model"] = plain
            if plain != model:
                self._differs(
                    "model_name", f"{model}: stored in 4 bits by bitsandbytes; the 16-bit model is read instead"
                )
        targets = self._keys.get("target_modules")
        if isinstance(targets, str):
            self._keys["target_modules"] = [name.strip() for name in targets.split(",")]
        if self._config["lora"] and self._source.keys.get("training_type") is not None:
            self._keys.setdefault("lora_r", 64)  # the default of `unsloth train`, not of get_peft_model

    def _hugging_face(self) -> None:
        found = entries.hugging_face(self._keys, self._missing)
        if found and self._formatted():
            for entry in found:
                for key in ("type", "text_field"):
                    entry.pop(key, None)
        if found:
            self._config["datasets"] = found

    def _llamafactory(self) -> None:
        stage = self._take("stage") or "sft"
        if stage not in ("sft", "pt"):
            self._refuse(f"stage: {stage}")
        if self._keys.get("do_predict") or "export_dir" in self._keys:
            self._refuse("a file that does not train")
        kind = self._take("finetuning_type") or "lora"
        if kind not in ("lora", "full"):
            self._refuse(f"finetuning_type: {kind}")
        self._config["lora"] = kind == "lora"
        folder = Path(self._take("dataset_dir") or "data")
        beside = [place for place in (folder, self._path.parent / folder) if (place / "dataset_info.json").is_file()]
        samples = self._take("max_samples")
        for key, ours in (("dataset", "datasets"), ("eval_dataset", "validation_datasets")):
            if names := self._take(key):
                folder = (beside or [folder])[0]
                self._config[ours] = entries.llamafactory(key, names, folder, samples, self._differs, self._missing)
        if stage == "pt":
            self._keys.setdefault("packing", True)
        self._template("template")
        self._warmup()
        self._zero_level()
        targets = self._keys.get("lora_target")
        if isinstance(targets, str) and targets != "all":
            self._keys["lora_target"] = [name.strip() for name in targets.split(",")]
        if kind == "lora" and "lora_alpha" not in self._keys:
            self._config["lora_alpha"] = 2 * self._keys.get("lora_rank", 8)


def _shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_list(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[\w.]+(,\s*[\w.]+)*", value) is not None


def _listed(value: Any) -> Any:
    return [name.strip() for name in value.split(",")] if _is_list(value) else value
