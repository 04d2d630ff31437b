"""Entries of `datasets` from those of other trainers. What is not taken out of a node is named afterwards."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from surogate_core.api import ConfigError

from .leaves import Leaf, Node, leaves_of
from .source import Rows, read_json

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
_ROLES = {
    "system": ("system",),
    "user": ("user", "human"),
    "assistant": ("assistant", "gpt", "bot", "model", "function_call", "tool_call"),
    "tool": ("tool", "observation", "function_response", "tool_response"),
}
"""Role -> its names in data sets that are read without a key."""

_PAIRS: Mapping[str, Mapping[str, str]] = {
    "intel": {"prompt_field": "question", "system_field": "system"},
    "icr": {"prompt_field": "input", "system_field": "system"},
    "prompt_pairs": {"prompt_field": "prompt", "system_field": "system"},
    "ultra": {"prompt_field": "prompt"},
    "argilla": {
        "prompt_field": "instruction",
        "chosen_field": "chosen_response",
        "rejected_field": "rejected_response",
    },
    "argilla_chat": {},
}
"""Types of axolotl for pairs, after the name of a template -> the columns that they read."""

_SHARDS = ("shards", "shards_idx", "preprocess_shards")


def axolotl(node: Node, kind: Any, loss: str) -> tuple[dict[str, Any], list[str]]:
    """Return an entry of axolotl's `datasets`, and what differs. kind: its type if it does not name one."""
    said: list[str] = []
    entry: dict[str, Any] = {"path": files(node)}
    hub(node, entry)
    typed = node.below("type")
    nested = any(len(leaf.place) > len(typed.place) for leaf in typed.open())
    kind = typed if nested else node.take("type") or kind
    if isinstance(kind, Node):
        entry |= _own_prompt(kind)
    elif loss:
        entry |= _pairs(node, str(kind), loss)
    elif str(kind).split(".")[0] in _CHAT:
        entry["type"] = "conversation"
        _renamed(node, entry, "field_messages", "messages_field", "conversations" if kind == "sharegpt" else None)
        _renamed(node, entry, "field_tools", "tools_field")
        _renamed(node, entry, "field_system", "system_field")
        _mappings(node, entry)
    elif str(kind).split(".")[0] in ("alpaca", "alpaca_w_system"):
        entry |= ALPACA
        if kind == "alpaca_w_system.load_open_orca":
            entry |= {"instruction_field": "question", "output_field": "response"}
            entry |= {"system_prompt_field": "system_prompt"}
            del entry["input_field"]
    elif kind in ("completion", "pretrain"):
        entry["type"] = "text"
        _renamed(node, entry, "field", "text_field")
        _renamed(node, entry, "text_column", "text_field")
    elif kind == "input_output":
        entry["type"] = "weighted"
        said.append(
            "input_output: segments with a label each are type weighted with loss: tokens and tokens_weights: true. "
            "Write `weight: 1` for `label: true` in the rows, and 0 for false"
        )
    elif kind is not None:
        for leaf in typed.leaves:
            leaf.settle("missing", f"{kind}: set type: conversation, instruction or text with the columns")
    _training(node)
    node.settle("drop_system_message", "missing", "remove the system messages from the rows")
    for key in _SHARDS:
        node.settle(key, "missing", "every row of an entry is read; set samples or weight in the entry")
    for key in ("ds_type", "trust_remote_code", "conversation", "revision"):
        if key == "revision" and node.look(key):
            node.settle(key, "missing", "give the files of a downloaded revision as path")
        else:
            node.settle(key, "unneeded", "files are read by their suffix, chats by the model's own template")
    return entry, said


def _own_prompt(kind: Node) -> dict[str, Any]:
    """Return the keys of a `type` that is a table with columns and a prompt."""
    entry: dict[str, Any] = {"type": "instruction", "use_chat_template": False}
    for theirs, ours in (
        ("field_instruction", "instruction_field"),
        ("field_output", "output_field"),
        ("field_input", "input_field"),
        ("field_system", "system_prompt_field"),
        ("system_prompt", "system_prompt"),
        ("format", "prompt_format"),
        ("no_input_format", "prompt_format_no_input"),
    ):
        value = kind.take(theirs)
        if value not in (None, ""):
            entry[ours] = value
    if "input_field" not in entry and "{input}" in entry.get("prompt_format", ""):
        entry["input_field"] = "input"
    entry.setdefault("prompt_format_no_input", entry.get("prompt_format", "{instruction}").replace("{input}", ""))
    return entry


def _pairs(node: Node, kind: str, loss: str) -> dict[str, Any]:
    """Return the keys of an entry whose rows compare answers."""
    labelled = loss == "kto"
    entry: dict[str, Any] = {"type": "labelled" if labelled else "preference"}
    known = dict(_PAIRS.get(kind.split(".")[-1], {}))
    if labelled:
        known = {key: column for key, column in known.items() if key not in ("chosen_field", "rejected_field")}
    entry |= known
    if kind.split(".")[0] in ("chat_template", "bradley_terry") and not known and not labelled:
        _renamed(node, entry, "field_messages", "prompt_field", "messages" if kind.startswith("chat") else None)
    _renamed(node, entry, "field_prompt", "prompt_field")
    _renamed(node, entry, "field_chosen", "chosen_field")
    _renamed(node, entry, "field_rejected", "rejected_field")
    _renamed(node, entry, "field_completion", "completion_field")
    _renamed(node, entry, "field_label", "label_field")
    _renamed(node, entry, "field_system", "system_field")
    _renamed(node, entry, "field_tools", "tools_field")
    for item in node.below("message_property_mappings").items():
        name, value = item.place[-1], [leaf.value for leaf in item.open()]
        plain = value in (["role"], ["content"], ["from"], ["value"]) or value == [name]
        said = "messages of these names are read" if plain else f"{value[0]}: rename it to {name} in the rows"
        for leaf in item.open():
            leaf.settle("unneeded" if plain else "missing", said)
    return entry


def _training(node: Node) -> None:
    """Settle the keys that say which messages are trained."""
    for key, allowed in (("roles_to_train", ["assistant"]), ("train_on_eos", "turn"), ("train_on_eot", "turn"),
                         ("chat_template", "tokenizer_default"), ("chat_template_jinja", None)):  # fmt: skip
        value = node.look(key)
        plain = value in (None, "", allowed, ["gpt"])
        said = "answers of the assistant are trained up to the end of their turn, in the model's own template"
        node.settle(key, "unneeded" if plain else "missing", said if plain else f"{value}: {said}")
    value = node.look("message_field_training")
    plain = value in (None, "train", "loss", "weight")
    said = "train, loss or weight in a message of the assistant says whether it is trained"
    node.settle("message_field_training", "unneeded" if plain else "missing",
                said if plain else f"{value}: rename this key of the messages to train: {said}")  # fmt: skip
    plain = node.look("field_thinking") in (None, "reasoning_content", "reasoning", "thinking")
    said = "reasoning_content, reasoning or thinking in a message is its reasoning"
    node.settle("field_thinking", "unneeded" if plain else "missing", said)
    node.settle("template_thinking_key", "unneeded", "the model's own template gets the reasoning by its name")
    node.settle("message_field_training_detail", "missing", "whole messages are trained or not: train in a message")
    for role in node.below("roles").items():
        name = role.place[-1]
        for leaf in role.open():
            given = leaf.value if isinstance(leaf.value, list) else [leaf.value]
            others = [str(word) for word in given if word not in _ROLES.get(name, ())]
            if others:
                leaf.settle("missing", f"{', '.join(others)}: write {name} in the rows; names of roles are not mapped")
            else:
                leaf.settle("unneeded", f"{', '.join(map(str, given))} are read as {name}")


def _renamed(node: Node, entry: dict[str, Any], theirs: str, ours: str, otherwise: Any = None) -> None:
    """Take the column that `theirs` names; it is written if it is not our default."""
    usual = {"messages_field": "messages", "text_field": "text", "tools_field": "tools", "system_field": "system"}
    value = node.take(theirs) or otherwise
    if value and (usual.get(ours) != value or entry["type"] in ("preference", "labelled")):
        entry[ours] = value


def _mappings(node: Node, entry: dict[str, Any]) -> None:
    given = node.below("message_property_mappings")
    known = {name: given.take(name) for name in ("role", "content", "tool_calls") if name in given}
    for key, name in (("message_field_role", "role"), ("message_field_content", "content")):
        if key in node:
            known[name] = node.take(key)
    for leaf in given.open():
        if leaf.value == leaf.place[-1]:
            leaf.settle("unneeded", "messages of these names are read")
        else:
            leaf.settle("missing", f"{leaf.value}: rename it to {leaf.place[-1]} in the rows")
    known = {name: column for name, column in known.items() if column}
    if known and any(name != column for name, column in known.items()):
        entry["message_property_mappings"] = known


def files(node: Node) -> Any:
    """Return the path of an entry: its one file, or what its path names."""
    path, found = node.take("path"), node.look("data_files")
    if isinstance(found, list) and len(found) == 1:
        found = found[0]
    if isinstance(found, str):
        node.take("data_files")
        return found
    node.settle("data_files", "missing", f"{found}: make an entry for each file, with the file as path")
    return path


def hub(node: Node, entry: dict[str, Any], split: str | None = None) -> None:
    """Move subset and split. `train[:20%]` has no counterpart but its split. split: what is taken of it."""
    if subset := node.take("name"):
        entry["subset"] = subset
    leaves = node.open("split")
    given = split or str(node.take("split") or "train")
    node.take("split")
    name, bracket, part = given.partition("[")
    if name != "train":
        entry["split"] = name
    count = part.removeprefix(":").removesuffix("]")
    if bracket and count.isdecimal() and part.startswith(":"):
        entry["samples"] = int(count)
    elif bracket:
        for leaf in leaves:
            leaf.settle("missing", f"[{part}: set samples to a number of rows")


def loaded(root: Node, rows: Rows) -> dict[str, Any]:
    """Return the entry of rows that a script reads by load_dataset."""
    place = ("load_dataset", str(rows.load))
    node = Node([leaf for leaf in root.leaves if leaf.place[:2] == place], place)
    for leaf in node.leaves:  # rows of one call may be trained and evaluated
        leaf.fate = None
    entry: dict[str, Any] = {"path": node.take("path")}
    given = node.look("data_files")
    found = given.get(rows.split or "train", given.get("train")) if isinstance(given, dict) else given
    if entry["path"] in ("json", "csv", "parquet", "text", "arrow") or found:
        name = found[0] if isinstance(found, list) and len(found) == 1 else found
        entry["path"] = name if isinstance(name, str) else entry["path"]
        if isinstance(given, dict):
            for leaf in node.open("data_files"):
                leaf.settle("converted")
        elif isinstance(name, str):
            node.take("data_files")
        else:
            node.settle("data_files", "missing", f"{found}: make an entry for each file, with the file as path")
        node.take("split")
    else:
        hub(node, entry, rows.split)
    if rows.samples:
        entry["samples"] = rows.samples
    return entry


def hugging_face(root: Node, split: str) -> list[dict[str, Any]]:
    """Return the entries of keys that name datasets or files, or of a list `datasets`. split: the key of the split."""
    entries = []
    for node in root.below("datasets").items():
        entry = {"path": files(node)}
        hub(node, entry)
        entries.append(entry)
    given = root.look("data_files") or root.look("local_dataset") or root.look("train_dataset")
    found = given.get("train") if isinstance(given, dict) else given
    for key in ("data_files", "local_dataset", "train_dataset"):
        root.take(key)
    names = {root.take(key) for key in ("dataset_name", "dataset") if isinstance(root.look(key), str)} - {""}
    subset, part = root.take("dataset_config"), root.take(split) or root.take("dataset_split")
    if not found and len(names) > 1:
        raise ConfigError(f"dataset_name and dataset name different data: {' and '.join(sorted(names))}. Keep one.")
    if found:
        entries += [{"path": path} for path in (found if isinstance(found, list) else [found])]
    else:
        for name in names:
            keys = {key: value for key, value in (("name", subset), ("split", part)) if value}
            node = Node([*leaves_of(keys)])
            entry = {"path": name}
            hub(node, entry)
            lost = [said for leaf in node.leaves for said in leaf.said if leaf.fate == "missing"]
            for leaf in [leaf for leaf in root.leaves if leaf.place in ((split,), ("dataset_split",)) and lost]:
                leaf.settle("missing", lost[0])
            entries.append(entry)
    return entries


def llamafactory(
    names: Sequence[str], root: Node, folder: Path, loss: str
) -> tuple[list[dict[str, Any]], list[str], list[Leaf]]:
    """Return (entries, names that are not described, leaves) for names of `dataset`.

    `dataset_info.json` in `folder` describes them; its keys are leaves as those of the file are.
    """
    table_file = folder / "dataset_info.json"
    table: Any = {}
    if table_file.is_file():
        try:
            table = read_json(table_file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise ConfigError(f"{table_file}: is not JSON: {error}. Correct it.") from None
    entries, unknown, leaves = [], [], []
    for name in names:
        info = table.get(name) if isinstance(table, dict) else None
        place = ("dataset_info.json", name)
        found = [*leaves_of(info, place)] if isinstance(info, dict) and info else []
        if not found:
            unknown.append(name)
        leaves += found
        entries.append(_from_info(name, Node(found, place), folder, loss))
    return entries, unknown, leaves


def _from_info(name: str, info: Node, folder: Path, loss: str) -> dict[str, Any]:
    hub_path = info.take("hf_hub_url") or info.take("script_url")
    local = info.take("file_name")
    info.settle("ms_hub_url", "unneeded" if hub_path or local else "missing", "files of ModelScope: give a path")
    info.settle("om_hub_url", "unneeded" if hub_path or local else "missing", "files of OpenMind: give a path")
    entry: dict[str, Any] = {"path": hub_path or (str(folder / local) if local else name)}
    if not info.leaves:
        return entry
    for key in ("subset", "split"):
        if value := info.take(key):
            entry[key] = value
    if count := info.take("num_samples"):
        entry["samples"] = count
    info.settle("folder", "missing", "give the files as path")
    columns, tags = info.below("columns"), info.below("tags")
    alpaca = (info.take("formatting") or "alpaca") == "alpaca"
    ranking = bool(info.take("ranking"))
    if ranking or columns.look("kto_tag"):
        return entry | _comparing(columns, tags, alpaca, ranking)
    if not alpaca:
        return entry | _messages(columns, tags)
    if {leaf.place[-1] for leaf in columns.open()} == {"prompt"}:
        return entry | {"type": "text", "text_field": columns.take("prompt")}
    no_columns = not columns.open()
    entry |= {"type": "instruction", "instruction_field": columns.take("prompt") or "instruction"}
    entry["output_field"] = columns.take("response") or "output"
    if query := columns.take("query") or ("input" if no_columns else None):
        entry["input_field"] = query
    if system := columns.take("system"):
        entry["system_prompt_field"] = system
    columns.settle("history", "missing", "make one conversation of messages of each row")
    return entry


def _messages(columns: Node, tags: Node) -> dict[str, Any]:
    entry: dict[str, Any] = {"type": "conversation"}
    if (messages := columns.take("messages") or "conversations") != "messages":
        entry["messages_field"] = messages
    for key in ("system", "tools"):
        if (column := columns.take(key)) and column != key:
            entry[f"{key}_field"] = column
    mapped = {"role": tags.take("role_tag") or "from", "content": tags.take("content_tag") or "value"}
    if mapped != {"role": "role", "content": "content"}:
        entry["message_property_mappings"] = mapped
    _tags(tags)
    return entry


def _tags(tags: Node) -> None:
    """Settle the names of roles."""
    roles = {"user_tag": "user", "assistant_tag": "assistant", "observation_tag": "tool"}
    roles |= {"function_tag": "assistant", "system_tag": "system"}
    for key, role in roles.items():
        value = tags.look(key)
        if value in _ROLES[role]:
            tags.settle(key, "unneeded", f"{value} is read as {role}")
        else:
            name = "function_call" if key == "function_tag" else role
            tags.settle(key, "missing", f"{value}: write {name} in the rows; names of roles are not mapped")


def _comparing(columns: Node, tags: Node, alpaca: bool, ranking: bool) -> dict[str, Any]:
    """Return the keys of rows with two answers, or with one and a label."""
    entry: dict[str, Any] = {"type": "preference" if ranking else "labelled"}
    if alpaca:
        entry["prompt_field"] = columns.take("prompt") or "instruction"
        if query := columns.take("query"):
            entry["input_field"] = query
    elif ranking:
        entry["prompt_field"] = columns.take("messages") or "conversations"
    if ranking:
        for key in ("chosen", "rejected"):
            if (column := columns.take(key)) and column != key:
                entry[f"{key}_field"] = column
    else:
        if not alpaca:
            entry |= {"prompt_field": None, "completion_field": columns.take("messages") or "conversations"}
        else:
            entry["completion_field"] = columns.take("response") or "output"
        entry["label_field"] = columns.take("kto_tag")
    for key in ("system", "tools"):
        if column := columns.take(key):
            entry[f"{key}_field"] = column
    for key in ("role_tag", "content_tag"):
        plain = tags.look(key) in ("role", "from", "content", "value")
        said = "messages with role and content, or from and value, are read"
        tags.settle(key, "unneeded" if plain else "missing", said if plain else f"{tags.look(key)}: {said}")
    _tags(tags)
    return entry
