"""Reads the keys of another trainer from YAML, JSON, a command line, or a Python script, which is not run."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from surogate_core.api import ConfigError

_NUMBER = re.compile(r"[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?")
_SECTIONS = ("data", "training", "lora", "logging")
"""Sections of `unsloth train`; their keys do not repeat."""

CALLS: Mapping[str, tuple[str, ...]] = {
    "from_pretrained": ("model_name",),
    "get_peft_model": (),
    "LoraConfig": (),
    "BitsAndBytesConfig": (),
    "SFTConfig": (),
    "TrainingArguments": (),
    "UnslothTrainingArguments": (),
    "SFTTrainer": (),
    "UnslothTrainer": (),
    "load_dataset": ("dataset", "dataset_config"),
    "get_chat_template": (),
    "train_on_responses_only": (),
}
"""Function of a script whose arguments are read -> the keys of its positional ones."""

_RENAMED = {("load_dataset", "path"): "dataset", ("load_dataset", "name"): "dataset_config"}
_RENAMED |= {("load_dataset", "split"): "dataset_split"}
_OBJECTS = {"model", "tokenizer", "processing_class", "train_dataset", "eval_dataset", "args", "data_collator"}
_OBJECTS |= {"callbacks", "peft_config", "quantization_config"}
"""Arguments that are objects of the script: what they hold is read where they are made."""


@dataclass
class Source:
    """Keys of a file, and words in it that tell its tool. computed: keys that a script computes -> the line."""

    keys: dict[str, Any]
    words: set[str] = field(default_factory=set)
    computed: dict[str, int] = field(default_factory=dict)


def read(path: Path) -> Source:
    """Return what a file sets. Raises ConfigError for one that cannot be read."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: cannot be read: {error}. Give a YAML, JSON, Python or shell file.") from None
    if path.suffix == ".py":
        return _script(path, text)
    if path.suffix in (".sh", ".txt", ".bash"):
        return _command_line(path, text)
    try:
        value = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (ValueError, yaml.YAMLError) as error:
        raise ConfigError(f"{path}: is not YAML: {' '.join(str(error).split())}") from None
    if not isinstance(value, dict) or not value:
        raise ConfigError(f"{path}: has no keys. Give the config of a run.")
    keys: dict[str, Any] = {}
    for key, inner in value.items():
        section = inner if key in _SECTIONS and isinstance(inner, dict) else {key: inner}
        keys |= {str(name): _typed(found) for name, found in section.items()}
    return Source(keys, {str(key) for key in value})


def _typed(value: Any) -> Any:
    """Return numbers as numbers, which YAML 1.1 reads as text without a point (1e-4)."""
    if isinstance(value, str) and _NUMBER.fullmatch(value.strip()):
        number = float(value)
        return int(number) if number.is_integer() and not re.search(r"[.eE]", value) else number
    if isinstance(value, str) and value.strip().lower() in ("true", "false"):
        return value.strip().lower() == "true"
    return value


def _command_line(path: Path, text: str) -> Source:
    try:
        words = shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ConfigError(f"{path}: is not a command line: {error}.") from None
    keys: dict[str, Any] = {}
    programs = set()
    name = ""
    for word in words:
        if word.startswith("--"):
            name, equals, value = word[2:].partition("=")
            name = name.replace("-", "_")
            keys[name] = _typed(value) if equals else True
        elif name and (not word.startswith("-") or _NUMBER.fullmatch(word)):
            before = keys[name]
            value = _typed(word)
            keys[name] = value if before is True else [*before, value] if isinstance(before, list) else [before, value]
        elif not name and "=" not in word:
            programs.add(Path(word).name)
    if not keys:
        raise ConfigError(f"{path}: has no options (--key value). Give the command line of a run.")
    if commands := programs & {"dpo", "grpo", "kto", "reward", "rloo", "sft"}:
        keys["command"] = min(commands)
    return Source(keys, programs | keys.keys())


def _script(path: Path, text: str) -> Source:
    try:
        tree = ast.parse(text, str(path))
    except SyntaxError as error:
        raise ConfigError(f"{path}: is not Python: {error.msg} (line {error.lineno}).") from None
    constants = dict(_constants(tree))
    source = Source({})
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            source.words |= {alias.name for alias in node.names} | {getattr(node, "module", None) or ""}
        elif isinstance(node, ast.Call):
            _call(node, constants, source)
    if not source.keys:
        raise ConfigError(f"{path}: calls none of {', '.join(CALLS)}. Give the script that trains.")
    return source


def _constants(tree: ast.Module) -> Iterator[tuple[str, Any]]:
    """Yield the names that are assigned one literal, each once in the whole script."""
    found: dict[str, list[ast.expr]] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Assign) and len(node.targets) == 1 and isinstance(node.targets[0], ast.Name):
            found.setdefault(node.targets[0].id, []).append(node.value)
    for name, values in found.items():
        if len(values) == 1:
            try:
                yield name, ast.literal_eval(values[0])
            except ValueError:
                continue


def _call(node: ast.Call, constants: Mapping[str, Any], source: Source) -> None:
    name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
    owner = getattr(getattr(node.func, "value", None), "id", "")
    if name in ("map", "to_sharegpt", "standardize_sharegpt", "standardize_data_formats") and node.args:
        source.computed.setdefault("formatted", node.lineno)
    if name not in CALLS or (name == "from_pretrained" and "Tokenizer" in owner):
        return
    source.words.add(name)
    given = [*zip(CALLS[name], node.args, strict=False), *((k.arg, k.value) for k in node.keywords if k.arg)]
    if name == "train_on_responses_only":
        source.keys[name] = True
    for key, expression in given:
        key = _RENAMED.get((name, key), key)
        if key in _OBJECTS:
            continue
        try:
            value = constants[expression.id] if isinstance(expression, ast.Name) else ast.literal_eval(expression)
        except (KeyError, ValueError):
            source.computed[key] = expression.lineno
            continue
        source.keys[key] = value
