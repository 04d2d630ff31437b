"""Applies the table of a tool to every leaf of a file. `tools.py` has what a table cannot say."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any

from surogate_core.api import ConfigError

from .leaves import Leaf, Node, tree_of
from .rules import UNSET, Rule, Tool, read_table, rules_of
from .settings import Settings, Wish
from .source import Source

_OFF: Sequence[Any] = (None, False, "", "none", "None", "no", [], {})
"""Values with which a key that is known asks for nothing."""
_EMPTY: Sequence[Any] = (None, "", [], {})
"""Values with which any key asks for nothing."""
_LISTS = ("lora_target_modules", "lora_target_parameters", "lora_modules_to_save")
_WHOLE_MODULES = ("embed_tokens", "lm_head")
"""Modules that PEFT adapts and that are trained in full here."""
PAIRS = ("dpo", "orpo", "simpo", "reward")
COMPARING = (*PAIRS, "kto")
"""Losses whose rows compare answers."""
ONLY = {
    "count": "a whole number",
    "fraction": "a part below 1",
    "steps": "a whole number, or a part below 1",
    "amount": "a number above 0",
}
"""Values that a key with `Rule.only` takes, in words."""
_REFUSED = (
    "is not converted. Fine-tuning, pre-training, DPO, KTO, ORPO, SimPO and reward models are; see docs/preference.md"
)


@cache
def _around(name: str) -> Mapping[str, Rule]:
    """Return the rules of what stands around the keys of a tool: calls of a script, launchers."""
    return rules_of(read_table(name))


class Conversion:
    """One file on its way. config, differing and added are complete after `run`."""

    def __init__(self, path: Path, source: Source, chosen: Tool) -> None:
        self.path, self.source, self.tool = path, source, chosen
        self.leaves = source.leaves
        self.settings = Settings()
        self.config: dict[str, Any] = {}
        self.entries: dict[str, list[dict[str, Any]]] = {}
        self.differing: list[tuple[str, str]] = []
        self.added: list[str] = []
        self.loss = ""

    @property
    def root(self) -> Node:
        return Node(self.leaves)

    @property
    def script(self) -> bool:
        return self.path.suffix == ".py"

    def run(self, own: Callable[[Conversion], None]) -> None:
        self._first()
        own(self)
        self._apply_rules(lambda rule: True)
        for wish, key, winner in self.settings.outvoted():
            self.differs(wish.name, f"{key} is {winner.value} by {winner.name}, which decides")
        if self.loss:
            self._compare()
        self._chat_template()
        self._cadences()
        self._adapter()
        self._defaults()
        self.config = self.settings.values() | self.entries
        if self.config.get("report_to") == "none":
            del self.config["report_to"]
        self._gpus()

    def differs(self, key: str, said: str) -> None:
        self.differing.append((key, said))

    def refuse(self, what: str, why: str = _REFUSED) -> None:
        raise ConfigError(f"{self.path}: {what} {why}.")

    # ------------------------------------------------------------------------------------------------- the rules

    def rule_of(self, leaf: Leaf) -> tuple[Rule | None, int]:
        """Return the rule of a leaf, and how many keys of its place the rule names."""
        for depth in range(len(leaf.place), 0, -1):
            name = ".".join(leaf.place[:depth])
            for table in self._tables(leaf.table):
                if name in table:
                    return table[name], depth
        return None, len(leaf.place)

    def _tables(self, name: str) -> Sequence[Mapping[str, Rule]]:
        if name:
            return [_around(name)]
        preference = [self.tool.preference] if self.loss else []
        return [*preference, self.tool.keys, *([_around("arguments")] if self.script else [])]

    def _apply_rules(self, chosen: Callable[[Rule], bool]) -> None:
        groups: dict[tuple[Any, ...], list[Leaf]] = {}
        found: dict[tuple[Any, ...], tuple[Rule | None, int]] = {}
        for leaf in self.leaves:
            if leaf.fate is None:
                rule, depth = self.rule_of(leaf)
                if rule is None or chosen(rule):
                    group = (leaf.table, leaf.owner, leaf.place[:depth])
                    groups.setdefault(group, []).append(leaf)
                    found[group] = rule, depth
        for group, leaves in groups.items():
            rule, depth = found[group]
            if rule is None:
                if chosen(Rule()):
                    for leaf in leaves:
                        self._unknown(leaf)
            else:
                self._apply(rule, leaves, depth)

    def _unknown(self, leaf: Leaf) -> None:
        if leaf.value in _EMPTY and not leaf.code:
            leaf.settle("unneeded", "asks for nothing")
        else:
            leaf.settle("missing", f"{_at(leaf)}{shown(leaf.value)}: is unknown to surogate convert")

    def _apply(self, rule: Rule, leaves: list[Leaf], depth: int) -> None:
        """Settle the leaves of one rule."""
        if rule.unneeded:
            for leaf in leaves:
                leaf.settle("unneeded", rule.unneeded)
        elif any(leaf.code for leaf in leaves):
            for leaf in leaves:
                where = "is computed by the script" if leaf.line else "is computed by the shell"
                if rule.missing or not (rule.to or rule.sets or rule.by):
                    said = rule.missing or rule.says or where
                    leaf.settle("missing", f"{_at(leaf)}{shown(leaf.value)}: {said}")
                else:
                    to = rule.to.replace("{loss}", self.loss)
                    leaf.settle("missing", f"{_at(leaf)}{where}" + (f"; set {to}" if to else f": {shown(leaf.value)}"))
        elif len(leaves) == 1 and len(leaves[0].place) == depth:
            self._value(rule, leaves, leaves[0].value)
        elif rule.whole:
            self._value(rule, leaves, tree_of(leaves, depth))
        elif rule.missing:
            for leaf in leaves:
                nothing = leaf.value in _EMPTY
                said = "asks for nothing" if nothing else f"{shown(leaf.value)}: {rule.missing}"
                leaf.settle("unneeded" if nothing else "missing", said)
        else:
            for leaf in leaves:
                self._unknown(leaf)

    def _value(self, rule: Rule, leaves: list[Leaf], value: Any) -> None:
        name = leaves[0].name if len(leaves) == 1 else ".".join(leaves[0].place[:1])
        off = _OFF if leaves[0].table != "calls" else _EMPTY  # a script that sets a thing to false does something
        nothing = value is None or (_same(value, rule.default) if rule.default is not UNSET else value in off)
        if rule.values:
            self._chosen(rule, leaves, name, value, nothing)
        elif rule.refused:
            if not nothing:
                self.refuse(f"{name}: {shown(value)}", rule.refused)
            self._settle(leaves, "unneeded", "asks for nothing")
        elif rule.missing or rule.by:
            if nothing:
                self._settle(leaves, "unneeded", "asks for nothing")
            else:
                self._settle(leaves, "missing", f"{_at(leaves[0])}{shown(value)}: {rule.missing or rule.by}")
        elif value is None:
            self._settle(leaves, "unneeded", "asks for nothing")
        elif rule.sets and not rule.to:
            if value in _OFF:
                self._settle(leaves, "unneeded", "asks for nothing")
            else:
                self._ask(rule, leaves, name, rule.sets, value)
        elif rule.to:
            self._renamed(rule, leaves, name, value)
        elif nothing:
            self._settle(leaves, "unneeded", "asks for nothing")
        else:
            self._settle(leaves, "converted", "")
            self.differs(name, f"{shown(value)}: {rule.says}")

    def _renamed(self, rule: Rule, leaves: list[Leaf], name: str, value: Any) -> None:
        if rule.only:
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            if not _is_only(rule.only, value):
                self._settle(leaves, "missing", f"{shown(value)}: {rule.to} is {ONLY[rule.only]}")
                return
        if rule.to in _LISTS:
            value = _listed(value)
            if isinstance(value, str) and not re.fullmatch(r"[\w.]+", value):
                self._settle(leaves, "missing", f"{shown(value)}: is an expression; {rule.to} is a list of names")
                return
        self._ask(rule, leaves, name, {rule.to: value, **(rule.sets if value not in _OFF else {})}, value)

    def _chosen(self, rule: Rule, leaves: list[Leaf], name: str, value: Any, nothing: bool) -> None:
        """Settle a key with a table of values."""
        words = [str(item).lower() for item in value] if isinstance(value, list) else [str(value).lower()]
        yes = {"true": "yes", "false": "no"}  # YAML 1.1 reads `no` as false
        found = [rule.values.get(word, rule.values.get(yes.get(word, word))) for word in words]
        if words and None not in found:
            if all(item == {} for item in found):
                if rule.says and not nothing:
                    self.differs(name, rule.says)
                    self._settle(leaves, "converted", "")
                else:
                    self._settle(leaves, "unneeded", f"{shown(value)}: nothing has to be set for it")
                return
            picked: Any = found[0] if len(found) == 1 else found
            changes = picked if isinstance(picked, Mapping) else {rule.to: picked}
            self._ask(rule, leaves, name, {**changes, **(rule.sets if value not in _OFF else {})}, value)
        elif rule.refused and not nothing:
            self.refuse(f"{name}: {shown(value)}", rule.refused)
        elif rule.says and not rule.to and not nothing and not any(rule.values.values()):
            self._settle(leaves, "converted", "")
            self.differs(name, f"{shown(value)}: {rule.says}")
        elif nothing:
            self._settle(leaves, "unneeded", "asks for nothing")
        elif rule.to in _LISTS or ([*rule.values] == ["auto"] and rule.to):
            self._renamed(rule, leaves, name, value)
        elif rule.missing:
            self._settle(leaves, "missing", f"{_at(leaves[0])}{shown(value)}: {rule.missing}")
        else:
            have = [v.get(rule.to) if isinstance(v, Mapping) else v for v in rule.values.values()]
            listed = ", ".join(dict.fromkeys(str(one) for one in have if one is not None))
            said = f"; {rule.to} may be {listed}" if rule.to else ""
            self._settle(leaves, "missing", f"{shown(value)}: is not built{said}")

    def _ask(self, rule: Rule, leaves: list[Leaf], name: str, changes: Mapping[str, Any], value: Any) -> None:
        weak = rule.default is not UNSET and _same(value, rule.default)
        for key, wanted in changes.items():
            if "{loss}" in key and self.loss in ("", "reward"):
                self._settle(leaves, "missing", f"{shown(value)}: a run without a preference loss has no such key")
                return
            self.settings.ask(key.replace("{loss}", self.loss), Wish(wanted, leaves, weak, rule.yields))
        self._settle(leaves, "converted", "")
        if rule.says and any(wanted not in _OFF for wanted in changes.values()):
            self.differs(name, rule.says)

    def _settle(self, leaves: list[Leaf], fate: Any, said: str) -> None:
        for leaf in leaves:
            leaf.settle(fate, said)

    # -------------------------------------------------------------------------------------- what several tools have

    def ask(self, key: str, value: Any, *names: str) -> None:
        """Set a key because of keys of the file, by name."""
        self.settings.ask(key, Wish(value, [leaf for leaf in self.leaves if leaf.place[0] in names]))

    def _first(self) -> None:
        """Apply the keys that choose a loss, or an adapter, before those that depend on it."""
        first = {"loss", "lora"}

        def decides(rule: Rule) -> bool:
            changes = [rule.sets, *(value for value in rule.values.values() if isinstance(value, Mapping))]
            return rule.to in first or any(first & change.keys() for change in changes)

        self._apply_rules(decides)
        self.loss = self.settings.value("loss", "")
        if self.loss and self.loss not in COMPARING:
            self.refuse(self.loss.upper())

    def _compare(self) -> None:
        """Set what runs that compare answers have of their own."""
        length = self.settings.value("sequence_len", self._default("sequence_len"))
        self.settings.drop("sequence_len")
        self.settings.ask("sequence_len", Wish(2 * length))
        cut = {"max_tokens": length} if self.loss != "reward" else {}
        why = "KTO compares the answers of a row" if self.loss == "kto" else "a row holds both answers of a pair"
        more = "loses the start of its prompt (max_tokens)" if cut else "is left out with its pair"
        self.differs("sequence_len", f"{2 * length}, because {why}; an answer of more than {length} tokens {more}")
        prompts = self.settings.drop("max_prompt_tokens")
        cut |= {"max_prompt_tokens": prompts[0].value} if prompts else {}
        for entry in (entry for found in self.entries.values() for entry in found):
            entry.setdefault("type", "labelled" if self.loss == "kto" else "preference")
            entry |= cut
        for key in ("loss_scale", "truncation_strategy"):
            for wish in self.settings.drop(key):
                self._settle([*wish.leaves], "unneeded", "answers are trained, and prompts of longer ones are cut")
        if self.loss == "kto":
            for wish in self.settings.drop("sample_packing"):
                self._settle([*wish.leaves], "unneeded", "KTO compares answers within a row: rows are packed")
            self.settings.ask("sample_packing", Wish(True))
        if self.loss in ("dpo", "kto") and not self.settings.value("lora") and "reference" not in self.settings:
            self.settings.ask("reference", Wish("frozen"))
            self.differs("reference", "frozen: the model before the first step, as a copy of its weights")

    def _cadences(self) -> None:
        """Drop what another key makes meaningless: steps beside epochs, and the direction of no metric."""
        for what in ("eval", "save"):
            strategy, times = f"{what}_strategy", f"{what}s_per_epoch"
            decides = strategy if self.settings.value(strategy, "steps") != "steps" else times
            if decides in self.settings:
                for wish in self.settings.drop(f"{what}_steps"):
                    self._settle(
                        [*wish.leaves], "unneeded", f"{decides} is {self.settings.value(decides)}, which decides"
                    )
        looks = self.settings.value("load_best_model_at_end") or "early_stopping_patience" in self.settings
        if "metric_for_best_model" not in self.settings and not looks:
            for wish in self.settings.drop("greater_is_better"):
                self._settle([*wish.leaves], "unneeded", "no best evaluation is looked for")

    def _chat_template(self) -> None:
        """Give what the chat template gets to the entries that have one."""
        given = self.settings.value("chat_template_kwargs")
        wishes = self.settings.drop("chat_template_kwargs")
        entries = [entry for found in self.entries.values() for entry in found]
        rendered = [entry for entry in entries if _is_rendered(entry)]
        for entry in rendered if given else ():
            entry["chat_template_kwargs"] = given
        for wish in wishes if not rendered else ():
            self._settle([*wish.leaves], "missing", "no entry of datasets is rendered by a chat template")

    def _adapter(self) -> None:
        """Move whole modules, rename the keys of LoRA for DoRA, and take them out of runs that train all weights."""
        settings = self.settings
        targets = settings.value("lora_target_modules")
        whole = [name for name in targets if name in _WHOLE_MODULES] if isinstance(targets, list) else []
        if whole:
            leaves = [leaf for wish in settings.drop("lora_target_modules") for leaf in wish.leaves]
            settings.ask("lora_target_modules", Wish([name for name in targets if name not in whole], leaves))
            saved = settings.value("lora_modules_to_save", [])
            saved = [saved] if isinstance(saved, str) else saved
            leaves += [leaf for wish in settings.drop("lora_modules_to_save") for leaf in wish.leaves]
            settings.ask("lora_modules_to_save", Wish([*dict.fromkeys([*saved, *whole])], leaves))
            self.differs(leaves[0].name, f"{', '.join(whole)}: trained in full with the adapter (lora_modules_to_save)")
        if settings.value("adapter") == "dora":
            settings.drop("lora")
            for key in [key for key in settings if key.startswith("lora_") and key != "lora_dtype"]:
                wishes, ours = settings.drop(key), key.replace("lora_", "dora_")
                for wish in wishes:
                    if ours in ("dora_rank", "dora_alpha", "dora_use_rslora", "dora_target_modules"):
                        settings.ask(ours, wish)
                    elif wish.value in (0, False, None):
                        self._settle([*wish.leaves], "unneeded", "asks for nothing")
                    else:
                        self._settle([*wish.leaves], "missing", f"{shown(wish.value)}: DoRA has no such key")
        elif not settings.value("lora"):
            for key in [key for key in settings if key.startswith(("lora_", "qlora_"))]:
                for wish in settings.drop(key):
                    self._settle([*wish.leaves], "unneeded", "no adapter is trained")

    def _default_values(self) -> dict[str, tuple[Any, str]]:
        tool = self.tool
        found = {**tool.defaults, **(tool.script if self.script else {})}
        if self.settings.value("lora") or self.settings.value("adapter"):
            found |= {**tool.adapter, **(tool.script_adapter if self.script else {})}
        return {**found, **tool.losses.get(self.loss, {})}

    def _default(self, key: str) -> Any:
        return self._default_values()[key][0]

    def _defaults(self) -> None:
        """Set the values that the tool has where the file sets none, or one that is lost."""
        for key, (value, says) in self._default_values().items():
            if self._is_set(key) or (value is None and key in self.source.names):
                continue
            if value is not None:
                self.settings.ask(key, Wish(value))
                self.added.append(key)
            if says:
                self.differs(key, says)

    def _is_set(self, key: str) -> bool:
        """Return whether the file sets a key of ours, or something with which it has no meaning."""
        settings, lora = self.settings, self.settings.value("lora")
        without = {
            "num_epochs": settings.value("max_steps", -1) > 0,
            "validation_split_ratio": "validation_datasets" in self.entries,
            "warmup_ratio": "warmup_steps" in settings or "warmup_steps" in self.source.names,
            "save_steps": "saves_per_epoch" in settings or settings.value("save_strategy", "steps") != "steps",
            "save_strategy": "saves_per_epoch" in settings or "save_steps" in settings,
            "eval_strategy": "evals_per_epoch" in settings or "eval_steps" in settings or not self._evaluates(),
            "loss_scale": bool(self.loss),
            "truncation_strategy": bool(self.loss),
        }
        adapter = key.startswith(("lora_", "qlora_")) and not lora
        return key in settings or key in self.entries or adapter or without.get(key, False)

    def _evaluates(self) -> bool:
        return "validation_datasets" in self.entries or bool(self.settings.value("validation_split_ratio"))

    def _gpus(self) -> None:
        if "gpus" in self.config:
            return
        rows = self.config["per_device_train_batch_size"] * self.config["gradient_accumulation_steps"]
        count = f"{rows} row{'s' if rows > 1 else ''}"
        said = f"one, so a step trains {count} of {self.config['sequence_len']} tokens; with N it trains N times"
        if level := self.config.get("zero_level"):
            said = f"one, so zero_level: {level} has nothing to divide among, and {said.removeprefix('one, so ')}"
        self.differs("gpus", f"{said} as many. Set gpus: N, or start by torchrun, as the launch command did")


def shown(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 80 else f"{text[:77]}..."


def _is_only(only: str, value: Any) -> bool:
    """Return whether a value is what `Rule.only` says."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    part = 0 <= value < 1
    return {"count": isinstance(value, int), "fraction": part, "steps": isinstance(value, int) or part,
            "amount": value > 0}[only]  # fmt: skip


def _is_rendered(entry: Mapping[str, Any]) -> bool:
    return entry.get("type") not in ("text", "weighted") and entry.get("use_chat_template", True)


def _at(leaf: Leaf) -> str:
    return f"line {leaf.line}: " if leaf.line and leaf.code else ""


def _same(value: Any, other: Any) -> bool:
    return bool(value == other) and isinstance(value, bool) == isinstance(other, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[\w.]+(,\s*[\w.]+)*", value) is not None


def _listed(value: Any) -> Any:
    return [name.strip() for name in value.split(",")] if _is_list(value) else value
