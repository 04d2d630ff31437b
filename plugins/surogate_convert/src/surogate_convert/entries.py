"""Entries of `datasets` from those of other trainers. Each function takes what it reads out of `given`."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

Note = Callable[[str, str], None]
"""(key, sentence) -> None"""

ALPACA = {
    "type": "instruction",
    "input_field": "input",
    "use_chat_template": False,
    "prompt_format": "Below is an instruction that describes a task, paired with an input that provides further "
    "context. Write a response that appropriately completes the request.\n\n### Instruction:\n{instruction}\n\n"
    "### Input:\n{input}\n\n### Response:\n",
    "prompt_format_no_input": "Below is an instruction that describes a task. Write a response that appropriately "
    "completes the request.\n\n### Instruction:\n{instruction}\n\n### Response:\n",
}
"""The entry of rows with instruction, input and output, in Alpaca's prompt."""

_CHAT = ("chat_template", "sharegpt", "chatml", "conversational")
_AXOLOTL_UNNEEDED = ("ds_type", "shards", "shards_idx", "preprocess_shards", "trust_remote_code", "conversation")


def axolotl(where: str, given: Mapping[str, Any], differs: Note, missing: Note) -> dict[str, Any]:
    """Return an entry of axolotl's `datasets`. where: its place, for notes."""
    rest = dict(given)
    entry: dict[str, Any] = {"path": _files(rest)}
    _hub(rest, entry, f"{where}.split", missing)
    kind = rest.pop("type", None)
    if isinstance(kind, dict):
        missing(f"{where}.type", "a prompt of your own: set type: instruction with prompt_format and the columns")
    elif str(kind).split(".")[0] in _CHAT:
        entry["type"] = "conversation"
        field = rest.pop("field_messages", "conversations" if kind == "sharegpt" else None)
        if field is not None and field != "messages":
            entry["messages_field"] = field
        _mappings(rest, entry, where, missing)
    elif str(kind).split(".")[0] in ("alpaca", "alpaca_w_system"):
        entry |= ALPACA
        if kind == "alpaca_w_system.load_open_orca":
            missing(f"{where}.type", "OpenOrca's columns: set instruction_field, output_field and system_prompt_field")
    elif kind in ("completion", "pretrain"):
        entry["type"] = "text"
        field = rest.pop("field", "text")
        entry |= {} if field == "text" else {"text_field": field}
    elif kind is not None:
        missing(f"{where}.type", f"{kind}: set type: conversation, instruction or text with the columns")
    for key, allowed in (("roles_to_train", ["assistant"]), ("train_on_eos", "turn"), ("chat_template", None)):
        value = rest.pop(key, allowed)
        if value not in (allowed, None, "tokenizer_default", ["gpt"]):
            differs(f"{where}.{key}", f"{value}: answers of the assistant are trained up to the end of their turn")
    for key in rest:
        if rest[key] not in (None, False, "", [], {}) and key not in _AXOLOTL_UNNEEDED:
            missing(f"{where}.{key}", "entries have no such key; see the dataset types in docs/datasets.md")
    return entry


def _files(rest: dict[str, Any]) -> Any:
    path, files = rest.pop("path", None), rest.pop("data_files", None)
    return files[0] if isinstance(files, list) and len(files) == 1 else files if isinstance(files, str) else path


def _hub(rest: dict[str, Any], entry: dict[str, Any], key: str, missing: Note) -> None:
    """Move subset and split. `train[:20%]` has no counterpart but its split."""
    if subset := rest.pop("name", None):
        entry["subset"] = subset
    split = str(rest.pop("split", None) or "train")
    name, bracket, part = split.partition("[")
    if name != "train":
        entry["split"] = name
    count = part.removeprefix(":").removesuffix("]")
    if bracket and count.isdecimal() and part.startswith(":"):
        entry["samples"] = int(count)
    elif bracket:
        missing(key, f"[{part}: set samples to a number of rows")


def _mappings(rest: dict[str, Any], entry: dict[str, Any], where: str, missing: Note) -> None:
    given = dict(rest.pop("message_property_mappings", None) or {})
    for key, name in (("message_field_role", "role"), ("message_field_content", "content")):
        if key in rest:
            given[name] = rest.pop(key)
    known = {name: column for name, column in given.items() if name in ("role", "content")}
    for name in given.keys() - known.keys():
        if given[name] != name:
            missing(f"{where}.message_property_mappings.{name}", "only role and content are renamed")
    if known and known != {"role": "role", "content": "content"}:
        entry["message_property_mappings"] = known


def hugging_face(keys: dict[str, Any], missing: Note) -> list[dict[str, Any]]:
    """Return the entries of TRL's and Unsloth's keys: names of datasets, files, or a list of `datasets`."""
    entries = []
    for number, given in enumerate(keys.pop("datasets", None) or ()):
        rest = dict(given)
        entry = {"path": _files(rest)}
        _hub(rest, entry, f"datasets.{number}.split", missing)
        entries.append(entry)
        for key in rest:
            missing(f"datasets.{number}.{key}", "entries have no such key; see docs/datasets.md")
    files = keys.pop("data_files", None) or keys.pop("local_dataset", None)
    files = files.get("train") if isinstance(files, dict) else files
    name = keys.pop("dataset_name", None) or keys.pop("dataset", None)
    keys.pop("dataset", None)
    paths = files if isinstance(files, list) else [files or name]
    split = keys.pop("dataset_train_split", None) or keys.pop("dataset_split", None)
    given = {"name": keys.pop("dataset_config", None), "split": split}
    for path in filter(None, paths):
        entry = {"path": path}
        if not files:
            _hub(dict(given), entry, "dataset_split", missing)
        entries.append(entry)
    kinds: dict[str, dict[str, Any]] = {"alpaca": ALPACA, "raw": {"type": "text"}}
    kinds |= {name: {"type": "conversation"} for name in ("chatml", "sharegpt", "conversational")}
    kind = kinds.get(keys.pop("format_type", None) or "", {})
    field = keys.pop("dataset_text_field", None)
    for entry in entries:
        entry |= kind or ({"type": "text"} | ({} if field == "text" else {"text_field": field}) if field else {})
    return entries


def llamafactory(
    key: str, names: Any, folder: Path, samples: Any, differs: Note, missing: Note
) -> list[dict[str, Any]]:
    """Return the entries for the names of `dataset`, as `dataset_info.json` in `folder` describes them."""
    table_file = folder / "dataset_info.json"
    table = json.loads(table_file.read_text(encoding="utf-8")) if table_file.is_file() else {}
    listed = names if isinstance(names, list) else str(names).split(",")
    entries = []
    for name in (str(item).strip() for item in listed):
        found = table.get(name)
        if found is None:
            missing(key, f"{name}: is not in {table_file}: set its path, type and columns")
        entry = _from_info(name, found or {}, folder, partial(missing, f"{key} {name}"))
        entries.append(entry | ({"samples": samples} if samples else {}))
    return entries


def _from_info(name: str, info: Mapping[str, Any], folder: Path, missing: Callable[[str], None]) -> dict[str, Any]:
    path = info.get("hf_hub_url") or info.get("ms_hub_url") or info.get("script_url")
    path = str(folder / info["file_name"]) if "file_name" in info and not path else path
    entry: dict[str, Any] = {"path": path or name}
    if not info:
        return entry
    entry |= {to: info[key] for key, to in (("subset", "subset"), ("split", "split")) if key in info}
    if info.get("num_samples"):
        entry["samples"] = info["num_samples"]
    columns, tags = dict(info.get("columns") or {}), dict(info.get("tags") or {})
    if info.get("ranking"):
        missing("preference data: set type: preference with the columns; see docs/preference.md")
    if info.get("formatting", "alpaca") == "alpaca":
        entry["type"] = "text" if columns.keys() == {"prompt"} else "instruction"
        if entry["type"] == "text":
            return entry | {"text_field": columns["prompt"]}
        entry["instruction_field"] = columns.get("prompt", "instruction")
        entry["output_field"] = columns.get("response", "output")
        if "query" in columns or not columns:
            entry["input_field"] = columns.get("query", "input")
        if "system" in columns:
            entry["system_prompt_field"] = columns["system"]
        if "history" in columns:
            missing("history: make one conversation of messages of each row")
        return entry
    entry["type"] = "conversation"
    if (messages := columns.get("messages", "conversations")) != "messages":
        entry["messages_field"] = messages
    if "system" in columns:
        entry["system_field"] = columns["system"]
    mapped = {"role": tags.get("role_tag", "from"), "content": tags.get("content_tag", "value")}
    if mapped != {"role": "role", "content": "content"}:
        entry["message_property_mappings"] = mapped
    return entry
