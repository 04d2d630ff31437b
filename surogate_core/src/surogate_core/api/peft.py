"""PEFT's adapter format, for adapters without files of their own: `adapter_config.json`, `adapter_model.safetensors`.

    FORMAT = PeftFormat(peft_type="IA3", parts={".ia3_l": ".ia3_l"}, merged=scaled_rows, keys={...})
    ADAPTER = FORMAT.adapter(name="ia3", summary=..., options=..., apply=..., trainable=...)

Torch, PEFT and transformers are imported on use.
"""

from __future__ import annotations

import json
import re
import shlex
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from reprlib import repr as brief  # a damaged file may hold a list of a million
from typing import TYPE_CHECKING, Any

from ..errors import ConfigError
from ..origin import Declared
from .adapters import AdapterDef, Merge
from .bounded_pattern import check_pattern, matches_whole
from .json_object import read_json_object
from .models import CAUSAL_LM, IMAGE_TEXT_TO_TEXT
from .regular_file import refuse_special
from .required import required

if TYPE_CHECKING:
    from torch import Tensor

PEFT_CONFIG = "adapter_config.json"
PEFT_TENSORS = "adapter_model.safetensors"

OFF: tuple[Any, ...] = (None, False, "", [], {})
"""Values that PEFT writes for a feature that an adapter does not use."""

PEFT_TASKS: Mapping[str, str] = {
    CAUSAL_LM: "CAUSAL_LM",
    IMAGE_TEXT_TO_TEXT: "CAUSAL_LM",
    "AutoModelForSequenceClassification": "SEQ_CLS",
    "AutoModelForTokenClassification": "TOKEN_CLS",
}
"""{class of transformers that loads a model: `task_type` of its adapters}."""

_PREFIX = "base_model.model."  # PEFT's wrapper, and the model in it
_WEIGHT = ".weight"
_ALL_LINEAR = "all-linear"
_HEAD = "lm_head"
_MAIN_REVISIONS = (None, "", "main")

Merged = Callable[["Tensor", Mapping[str, "Tensor"], Mapping[str, Any]], "Tensor"]


@dataclass(frozen=True, kw_only=True)
class PeftFormat(Declared):
    """The files of one kind of adapter of linear modules, as PEFT reads and writes them.

    Params of the adapter are named after the module of the checkpoint that they belong to: `model.layers.0.mlp.up_proj`
    and one of `parts`.

    peft_type  its type in the config file
    parts      {end of a param's name: end of its tensor's name in the file}; each adapted module has all of them
    merged     (the module's weight in fp32, its params by their ends, content of the config file) -> the merged weight
    keys       {field of the config file: key of the options}: what decides how the tensors are used. A saved adapter is
               trained further with the same values.
    marks      {field: value} by which this kind differs from others of the type. A value that is off (OFF) means any
               that is.
    values     {field: the values that are understood}; `save` writes the first
    inert      fields of which any value is read, because what the tensors compute does not depend on them

    A field that is in none of these is refused unless it is off, so that no adapter is misread.
    """

    peft_type: str
    parts: Mapping[str, str]
    merged: Merged
    keys: Mapping[str, str] = field(default_factory=dict)
    marks: Mapping[str, Any] = field(default_factory=dict)
    values: Mapping[str, Sequence[Any]] = field(default_factory=dict)
    inert: Sequence[str] = ()

    def adapter(self, **fields: Any) -> AdapterDef:
        """Return an adapter with this format. `fields`: those of AdapterDef that are not about files."""
        return AdapterDef(
            save=self.save,
            load=self.load,
            merge=self.merge,
            matches=self.matches,
            config_file=PEFT_CONFIG,
            library="peft",
            check=check_in_peft,
            commands=lambda folder, base_model, options: load_in_peft(folder, base_model),
            **fields,
        )

    def matches(self, folder: Path) -> bool:
        """Return whether a folder holds an adapter of this kind."""
        try:
            config = read_peft_config(folder)
        except ConfigError:
            return False
        return config.get("peft_type") == self.peft_type and all(
            _same(config.get(name), value) for name, value in self.marks.items()
        )

    def save(self, trained: Mapping[str, Tensor], folder: Path, base_model: str, options: Any) -> None:
        """Write an adapter that PEFT loads."""
        named = {name: self._split(name) for name in trained}
        config = {
            "peft_type": self.peft_type,
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base_model,
            "revision": None,
            "inference_mode": True,
            "target_modules": sorted({module for module, _ in named.values()}),
            **{name: _plain(getattr(options, key)) for name, key in self.keys.items()},
            **self.marks,
            **{name: understood[0] for name, understood in self.values.items()},
        }
        stored = {f"{module}{self.parts[end]}": trained[name] for name, (module, end) in named.items()}
        write_peft(folder, stored, config)

    def load(self, folder: Path, options: Any) -> Mapping[str, Tensor]:
        """Return the tensors of a saved adapter by the names of params. The options must be those of the file."""
        config = self._read_config(folder)
        for name, key in self.keys.items():
            saved, given = _plain(config.get(name)), _plain(getattr(options, key))
            if not _same(saved, given):
                raise ConfigError(
                    f"{folder / PEFT_CONFIG}: {name} is {saved}, but {key} is {given}. Set {key} to the first."
                )
        modules = self._read_tensors(folder, config)
        return {module + end: tensor for module, parts in modules.items() for end, tensor in parts.items()}

    def merge(self, folder: Path) -> Merge:
        """Return the changes of the base's weights: in fp32, rounded once to the dtype of the weight."""
        config = self._read_config(folder)
        modules = self._read_tensors(folder, config)
        base, revision = config.get("base_model_name_or_path"), config.get("revision")
        return Merge(
            base if isinstance(base, str) else "",
            {
                f"{module}{_WEIGHT}": partial(
                    self._change, parts=parts, config=config, place=f"{folder / PEFT_TENSORS}: {module}"
                )
                for module, parts in modules.items()
            },
            base_revision="" if revision in _MAIN_REVISIONS else str(revision),
        )

    def _change(self, weight: Tensor, *, parts: Mapping[str, Tensor], config: Mapping[str, Any], place: str) -> Tensor:
        try:
            merged = self.merged(weight.float(), {end: tensor.float() for end, tensor in parts.items()}, config)
        except (RuntimeError, ArithmeticError, TypeError, KeyError) as error:
            reason = f"{type(error).__name__}: {error}".splitlines()[0]
            raise ConfigError(
                f"{place} does not fit {PEFT_CONFIG} and a weight {list(weight.shape)}: {reason}."
            ) from error
        if merged.shape != weight.shape:
            raise ConfigError(
                f"{place} is of a weight {list(merged.shape)}; the base's is {list(weight.shape)}. Name its own base."
            )
        return merged.to(weight.dtype)

    def _split(self, name: str) -> tuple[str, str]:
        """Return (module, end) of the name of a param."""
        end = next(end for end in self.parts if name.endswith(end))
        return name.removesuffix(end), end

    def _read_config(self, folder: Path) -> dict[str, Any]:
        path, config = folder / PEFT_CONFIG, read_peft_config(folder)
        known = {*_ALWAYS_KNOWN, *self.keys, *self.marks, *self.inert}
        for name, value in {"peft_type": self.peft_type, **self.marks}.items():
            if not _same(config.get(name), value):
                raise ConfigError(
                    f"{path}: {name} is {brief(config.get(name))}, expected {value!r}. Name another adapter."
                )
        for name, value in config.items():
            understood = ("CAUSAL_LM",) if name == "task_type" else self.values.get(name, ())
            if name not in known and value not in (*OFF, *understood):
                raise ConfigError(
                    f"{path}: {name} is {brief(value)}, which is not built. Merge the adapter in PEFT "
                    "(merge_and_unload); or remove the key from the file if it has no effect."
                )
        return config

    def _read_tensors(self, folder: Path, config: Mapping[str, Any]) -> dict[str, dict[str, Tensor]]:
        """Return {module: {end of a param's name: tensor}}."""
        path, selects = folder / PEFT_TENSORS, _selection(folder / PEFT_CONFIG, config.get("target_modules"))
        modules: dict[str, dict[str, Tensor]] = defaultdict(dict)
        for name, tensor in read_peft_tensors(folder).items():
            end = next((end for end, stored in self.parts.items() if name.endswith(stored)), None)
            if end is None:
                raise ConfigError(f"{path}: {name} is no tensor of this kind of adapter. Merge the adapter in PEFT.")
            module = name.removesuffix(self.parts[end])
            if not selects(module):
                raise ConfigError(
                    f"{path}: holds an adapter of {module}, which target_modules of {PEFT_CONFIG} does not select: "
                    "PEFT leaves it out. Name it there, or remove its tensors."
                )
            modules[module][end] = tensor
        for module, parts in modules.items():
            if missing := self.parts.keys() - parts.keys():
                raise ConfigError(f"{path}: lacks {module}{self.parts[min(missing)]}. Save the adapter again.")
        return modules


_ALWAYS_KNOWN = (
    *("peft_type", "base_model_name_or_path", "revision", "target_modules"),
    *("inference_mode", "auto_mapping", "peft_version", "runtime_config"),  # nothing that the adapter computes
)


def _same(found: Any, value: Any) -> bool:
    return found in OFF if value in OFF else found == value


def _plain(value: Any) -> Any:
    """Return whole numbers as PEFT's users write them."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _selection(path: Path, targets: Any) -> Callable[[str], bool]:
    """Return whether `target_modules` selects a module: the end of its name, or one expression for the whole name."""
    if isinstance(targets, list) and targets and all(isinstance(target, str) for target in targets):
        ends = {*targets}
        return lambda module: any(end in ends for end in _ends(module))
    if not isinstance(targets, str) or not targets:
        raise ConfigError(f"{path}: target_modules is {brief(targets)}. Name the adapter's modules.")
    if targets.lower() == _ALL_LINEAR:
        return lambda module: module != _HEAD
    try:
        check_pattern(targets)
    except re.error as error:
        raise ConfigError(f"{path}: target_modules: {brief(targets)} is no regular expression: {error}.") from None
    return lambda module: matches_whole(targets, module)


def _ends(module: str) -> Iterator[str]:
    """Yield the name, and its ends from a dot on."""
    yield module
    while "." in module:
        module = module.partition(".")[2]
        yield module


# --------------------------------------------------------------------------------------------------------------- files


def read_peft_config(folder: Path) -> dict[str, Any]:
    """Return the content of a folder's `adapter_config.json`. Raises ConfigError if it cannot be read."""
    missing = f"{folder} holds no {PEFT_CONFIG}: name the folder that has it."
    return read_json_object(folder / PEFT_CONFIG, "Save the adapter again.", missing)


def read_peft_tensors(folder: Path) -> dict[str, Tensor]:
    """Return the tensors of a folder by their names in the model. Raises ConfigError if they cannot be read."""
    safetensors = required("safetensors.torch", __name__)
    from safetensors import SafetensorError

    path = folder / PEFT_TENSORS
    refuse_special(path)
    try:
        stored = safetensors.load_file(path)
    except FileNotFoundError:
        raise ConfigError(f"{folder}: holds no {PEFT_TENSORS}. Pickled adapters are never read.") from None
    except SafetensorError as error:
        raise ConfigError(f"{path}: is truncated or corrupt ({error}). Save the adapter again.") from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}.") from None
    other = next((name for name in stored if not name.startswith(_PREFIX)), None)
    if other is not None:
        raise ConfigError(f"{path}: {other} does not begin with {_PREFIX}, and PEFT leaves it out. Save it with PEFT.")
    return {name.removeprefix(_PREFIX): tensor for name, tensor in stored.items()}


def write_peft(folder: Path, tensors: Mapping[str, Tensor], config: Mapping[str, Any]) -> None:
    """Write an adapter. `tensors` have their names in the model."""
    stored = {f"{_PREFIX}{name}": tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
    required("safetensors.torch", __name__).save_file(stored, folder / PEFT_TENSORS, metadata={"format": "pt"})
    (folder / PEFT_CONFIG).write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def check_in_peft(folder: Path, base_dir: Path) -> None:
    """Load the adapter in PEFT, onto its base without the base's data. Raises ValueError for tensors that do not fit.

    PEFT itself raises for another shape, or files that it cannot read.
    """
    import torch

    transformers = required("transformers", __name__)
    required("peft", __name__)
    from peft import PeftConfig, PeftModel
    from transformers import AutoConfig, AutoTokenizer

    config = PeftConfig.from_pretrained(str(folder))
    loaded_by = next((loader for loader, task in PEFT_TASKS.items() if task == config.task_type), CAUSAL_LM)
    if loaded_by == CAUSAL_LM and _has_towers(base_dir):
        loaded_by = IMAGE_TEXT_TO_TEXT
    score = read_peft_tensors(folder).get("score.weight")  # transformers' and PEFT's name for such a head
    labels = {} if score is None else {"num_labels": len(score)}
    with torch.device("meta"):
        base_config = AutoConfig.from_pretrained(base_dir, local_files_only=True, **labels)
        model = PeftModel(getattr(transformers, loaded_by).from_config(base_config), config)
    report = model.load_adapter(str(folder), "default", low_cpu_mem_usage=True)
    for what, names in (("lacks", report.missing_keys), ("holds, unexpectedly,", report.unexpected_keys)):
        if names:
            raise ValueError(f"it {what} {names[0]} ({len(names)} such tensors)")
    if (folder / "tokenizer_config.json").is_file():
        AutoTokenizer.from_pretrained(folder, local_files_only=True)


def _has_towers(base_dir: Path) -> bool:
    """Return whether a base is of a class with towers, of which `AutoModelForCausalLM` may load the text alone."""
    named = read_json_object(base_dir / "config.json").get("architectures")
    return isinstance(named, list) and any(str(name).endswith("ForConditionalGeneration") for name in named)


def load_in_peft(folder: Path, base_model: str, loaded_by: str = CAUSAL_LM, **loading: object) -> list[tuple[str, str]]:
    """Return pairs of a program and the line that loads an adapter there, by PEFT. The last two are of the model."""
    if loaded_by == IMAGE_TEXT_TO_TEXT:
        base = f"transformers.{loaded_by}.from_pretrained({base_model!r})"
        return [("PEFT", f"peft.PeftModel.from_pretrained({base}, {str(folder)!r})")]
    given = "".join(f", {key}={value!r}" for key, value in loading.items())
    peft = ("PEFT", f"peft.AutoPeft{loaded_by.removeprefix('Auto')}.from_pretrained({str(folder)!r}{given})")
    if loaded_by != CAUSAL_LM:
        return [peft]
    model_args = shlex.quote(f"pretrained={base_model},peft={folder}")
    return [
        peft,
        ("lm-eval", f"lm_eval --model hf --model_args {model_args} --tasks gsm8k"),
    ]
