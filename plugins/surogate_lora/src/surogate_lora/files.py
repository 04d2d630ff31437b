"""PEFT's adapter format: `adapter_config.json` and `adapter_model.safetensors`. Torch is imported on use."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as brief
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, ValidationError, ValidationInfo, field_validator

from surogate_core.api import CAUSAL_LM, ConfigError, Merge, check_pattern
from surogate_core.api.peft import OFF, PEFT_TASKS, read_peft_config, read_peft_tensors, write_peft
from surogate_core.api.peft import PEFT_CONFIG as CONFIG_FILE
from surogate_core.api.peft import PEFT_TENSORS as TENSORS_FILE

from . import experts
from .experts import Parameters
from .fields import MERGE_THERE, check_fields, check_trainable
from .matching import Selection, is_saved, is_target
from .options import ALL_LINEAR, LoraOptions
from .principal import joined, parted
from .saved_modules import EMBEDDING, HEAD, module_of
from .weight_targets import WEIGHT, named_by_weight, with_weights, without_weights

if TYPE_CHECKING:
    from torch import Tensor

_SUFFIX = ".weight"
_KINDS = (".lora_A", ".lora_B")
_STACKS = (experts.DOWN, experts.UP)
_HEAD = f"{HEAD}{_SUFFIX}"
_BESIDE_TOWERS = re.compile(r"(model\.\w+\.)layers\.")
"""Name of a module of a block of a text model, in the classes of transformers that have towers beside it."""

NO_EXPERTS: Parameters = {}
"""The parameters of experts of a model that has none."""

_KEYS = {
    "r": "lora_rank",
    "lora_alpha": "lora_alpha",
    "use_rslora": "lora_use_rslora",
    "rank_pattern": "lora_rank_pattern",
    "alpha_pattern": "lora_alpha_pattern",
}
"""Keys of PEFT that decide what matrices compute -> ours."""

_MAIN_REVISIONS = (None, "", "main")
"""Values of `revision` that mean what a model's name alone means."""


# --------------------------------------------------------------------------------------------------------------- write


def save(
    trained: Mapping[str, Tensor],
    folder: Path,
    base_model: str,
    options: LoraOptions,
    task: str | None = PEFT_TASKS[CAUSAL_LM],
    parameters: Parameters = NO_EXPERTS,
) -> None:
    """Write an adapter that PEFT loads, and vLLM unless whole modules are in it. `parameters`: of the model's experts.

    A weight that is tied is written under both names, as PEFT does where it is told to keep it tied.
    """
    tensors, options = joined(trained), options.as_saved
    tied = _names_head(options) and _HEAD not in tensors
    if tied:
        (embedding,) = (name for name in tensors if module_of(name).endswith(EMBEDDING))
        tensors[_HEAD] = tensors[embedding].clone()
    config = _config(tensors, tied, base_model, options, task)
    named = experts.as_saved(tensors, options, parameters)
    stored = {f"{name}{_SUFFIX if name.endswith(_KINDS) else ''}": tensor for name, tensor in named.items()}
    write_peft(folder, stored, config)


def _names_head(options: LoraOptions) -> bool:
    return any(is_saved(HEAD, name) for name in options.lora_modules_to_save)


def _config(
    tensors: Mapping[str, Tensor], tied: bool, base_model: str, options: LoraOptions, task: str | None
) -> dict[str, Any]:
    modules = list(dict.fromkeys(module_of(name) for name in tensors if name.endswith(_KINDS)))
    by_weight = named_by_weight(modules, base_model)
    others = [module for module in modules if module not in by_weight]
    targets: list[str] = list(options.lora_target_modules)
    if any(target.lower() in ALL_LINEAR for target in targets):
        targets = list(dict.fromkeys(module.rpartition(".")[2] for module in others))
    elif by_weight:
        targets = [target for target in targets if any(is_target(module, target) for module in others)]
    parameters = [*options.lora_target_parameters, *(f"{module}{WEIGHT}" for module in by_weight)]
    ranks, alphas = options.lora_rank_pattern, options.lora_alpha_pattern
    if by_weight:
        ranks, alphas = with_weights(ranks), with_weights(alphas)
    saved = list(options.lora_modules_to_save)
    whole = dict.fromkeys(module_of(name) for name in tensors if not name.endswith((*_KINDS, *_STACKS)))
    saved += [module for module in whole if not any(is_saved(module, name) for name in (*saved, *([HEAD] * tied)))]
    return {
        "peft_type": "LORA",
        "task_type": task,
        "base_model_name_or_path": base_model,
        "revision": None,
        "inference_mode": True,
        "r": options.lora_rank,
        "lora_alpha": _plain(options.lora_alpha),
        "lora_dropout": 0.0 if by_weight else options.lora_dropout,  # PEFT has none of parameters
        "use_rslora": options.lora_use_rslora,
        "target_modules": _selecting(sorted(targets), others),
        **({"target_parameters": parameters} if parameters else {}),
        "bias": "none",
        "fan_in_fan_out": False,
        "init_lora_weights": True,
        "modules_to_save": saved or None,
        **({"ensure_weight_tying": True} if tied else {}),
        "use_dora": False,
        "rank_pattern": ranks,
        "alpha_pattern": _plain(alphas),
        "layers_to_transform": None,
        "layers_pattern": None,
        "auto_mapping": None,
    }


def _selecting(targets: list[str], modules: Sequence[str]) -> list[str] | str:
    """Return PEFT's `target_modules` for `modules`: their ends, or one expression if the model also has towers, which
    have modules of such names too."""
    places = {place[1] for module in modules if (place := _BESIDE_TOWERS.match(module))}
    if len(places) != 1 or not all(module.startswith(tuple(places)) for module in modules):
        return targets
    return rf"{re.escape(*places)}(.*\.)?({'|'.join(map(re.escape, targets))})"


def _plain(value: Any) -> Any:
    """Whole numbers as PEFT's users write them."""
    if isinstance(value, dict):
        return {key: _plain(inner) for key, inner in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


# ---------------------------------------------------------------------------------------------------------------- read


def matches(folder: Path) -> bool:
    """Return whether a folder holds an adapter of PEFT's type LORA that is no DoRA."""
    try:
        config = read_peft_config(folder)
    except ConfigError:
        return False
    return config.get("peft_type") == "LORA" and config.get("use_dora") in OFF


@dataclass(frozen=True)
class _Config:
    """The checked contents of an `adapter_config.json`. raw: as it stands there; options: its keys, as ours."""

    raw: Mapping[str, Any]
    options: LoraOptions
    selection: Selection
    base_model: str
    is_tied: bool

    @property
    def revision(self) -> str:
        """The revision of the base; "" for the main one."""
        revision = self.raw.get("revision")
        return "" if revision in _MAIN_REVISIONS else str(revision)


def load(folder: Path, options: LoraOptions, parameters: Parameters = NO_EXPERTS) -> dict[str, Tensor]:
    """The tensors of a saved adapter, by name, to go on training them under the same options."""
    config = _read_config(folder, parameters)
    check_trainable(config.raw, folder / CONFIG_FILE)
    written = options.as_saved
    for theirs, ours in _KEYS.items():
        saved, given = _plain(getattr(config.options, ours)), _plain(getattr(written, ours))
        if saved != given:
            raise ConfigError(
                f"{folder / CONFIG_FILE}: {theirs} is {saved}, but {ours} is {given}"
                + ("" if written is options else f" with that of the frozen part (lora_init: {options.lora_init})")
                + f". Set {ours} to the first."
            )
    tensors = _read_tensors(folder, config, parameters)
    if _names_head(options) and _HEAD not in tensors:
        raise ConfigError(
            f"{folder / TENSORS_FILE}: lacks {_HEAD}, which lora_modules_to_save names. Set that key to the adapter's "
            "modules_to_save."
        )
    if config.is_tied:
        tensors.pop(_HEAD, None)
    return tensors if written is options else parted(tensors)


def merge(folder: Path, parameters: Parameters | None = NO_EXPERTS) -> Merge:
    """For each projection of a saved adapter: W + scale * B A, summed in fp32, in the dtype of W; whole modules as
    they are, in that dtype. `parameters`: of the experts of the base; None: the base is not known."""
    config = _read_config(folder, parameters)
    if parameters is None and config.options.lora_target_parameters:
        return _of_unknown(folder / CONFIG_FILE, config)
    tensors = _read_tensors(folder, config, parameters or NO_EXPERTS)
    path = folder / TENSORS_FILE
    if (task := config.raw.get("task_type")) not in (None, PEFT_TASKS[CAUSAL_LM]):
        what = f"task_type is {task}: only language models are merged"
        raise ConfigError(f"{folder / CONFIG_FILE}: {what}. {MERGE_THERE}.")
    changes = _changes(path, tensors, config.options, parameters or NO_EXPERTS)
    whole = {name: tensor for name, tensor in tensors.items() if not name.endswith((*_KINDS, *_STACKS))}
    changes |= {name: _replacement(f"{path}: {name}", tensor) for name, tensor in whole.items()}
    ends = [name for name in changes if module_of(name).endswith((EMBEDDING, HEAD))]
    apart = [name for name in ends if name not in whole or not config.is_tied]

    def check(base: Mapping[str, Any]) -> None:
        if apart and base.get("tie_word_embeddings"):
            raise ConfigError(
                f"{path}: {apart[0]} was trained apart from its other end, and the base ties the two: one model cannot "
                "hold both. Use the adapter unmerged, or train it with both in lora_modules_to_save."
            )

    may_lack = (_HEAD,) if config.is_tied else ()
    return Merge(config.base_model, changes, may_lack=may_lack, check=check, base_revision=config.revision)


def _of_unknown(path: Path, config: _Config) -> Merge:
    """Return the merge of adapters of experts into a base of which no package says where they are."""

    def check(base: Mapping[str, Any]) -> None:
        kind = next(iter(base.get("architectures") or [base.get("model_type")]))
        raise ConfigError(
            f"{path}: has adapters of experts, {', '.join(config.options.lora_target_parameters)}, and no installed "
            f"package builds {kind} with the base's config.json, or says where they are. Install it, or name the "
            "run.yaml whose plugins have it: --config PATH."
        )

    return Merge(config.base_model, {}, check=check, base_revision=config.revision)


def _changes(
    path: Path, tensors: Mapping[str, Tensor], options: LoraOptions, parameters: Parameters
) -> dict[str, Callable[[Tensor], Tensor]]:
    changes = {}
    for module in sorted({module_of(name) for name in tensors if name.endswith((*_KINDS, *_STACKS))}):
        rank, factor = options.rank_of(module), options.scale_of(module)
        down, up = (tensors.get(module + kind) for kind in _KINDS)
        if down is not None and up is not None and down.shape[0] == up.shape[1] == rank:
            changes[f"{module}{_SUFFIX}"] = _change(f"{path}: {module}", down, up, factor)
            continue
        down, up = (tensors.get(module + kind) for kind in _STACKS)
        if down is None or up is None or up.shape[0] % (down.shape[0] // rank):
            raise ConfigError(f"{path}: {module} has no lora_A [r, in] with a lora_B [out, r] of rank {rank}.")
        changes |= experts.changes_of(f"{path}: {module}", parameters[module], down, up, rank, factor)
    return changes


def _change(place: str, down: Tensor, up: Tensor, factor: float) -> Callable[[Tensor], Tensor]:
    def merged(weight: Tensor) -> Tensor:
        shape = [up.shape[0], down.shape[1]]
        if list(weight.shape) != shape:
            raise ConfigError(f"{place} is of a weight {shape}; the base's is {list(weight.shape)}. Name its own base.")
        return (weight.float() + factor * (up.float() @ down.float())).to(weight.dtype)

    return merged


def _replacement(place: str, trained: Tensor) -> Callable[[Tensor], Tensor]:
    def replaced(weight: Tensor) -> Tensor:
        if weight.shape != trained.shape:
            is_resized = weight.shape[1:] == trained.shape[1:] and module_of(place).endswith((EMBEDDING, HEAD))
            remedy = (
                "The adapter was saved after its base's vocabulary was resized. Resize the base in transformers too: "
                f"model.resize_token_embeddings({len(trained)}), save_pretrained, and name its folder: --base FOLDER."
                if is_resized
                else "Name its own base."
            )
            raise ConfigError(f"{place} is {list(trained.shape)}; the base's is {list(weight.shape)}. {remedy}")
        return trained.to(weight.dtype)

    return replaced


def _read_config(folder: Path, parameters: Parameters | None) -> _Config:
    path, config = folder / CONFIG_FILE, read_peft_config(folder)
    if config.get("peft_type") != "LORA":
        raise ConfigError(f"{path}: peft_type must be LORA: other adapters are not built.")
    check_fields(config, path)
    rank, alpha = config.get("r"), config.get("lora_alpha")
    if isinstance(rank, bool) or not isinstance(rank, int) or rank < 1:
        raise ConfigError(f"{path}: r must be a whole number of at least 1 (got {rank!r}).")
    if isinstance(alpha, bool) or not isinstance(alpha, int | float):
        raise ConfigError(f"{path}: lora_alpha must be a number (got {alpha!r}).")
    given = {ours: config.get(theirs) for theirs, ours in _KEYS.items()} | {
        "lora_modules_to_save": config.get("modules_to_save"),
        "lora_target_parameters": [
            n for n in config.get("target_parameters") or () if not (isinstance(n, str) and n.endswith(WEIGHT))
        ],
    }
    for key in ("lora_rank_pattern", "lora_alpha_pattern"):
        if isinstance(given[key], Mapping):
            given[key] = without_weights(given[key])
    try:
        options = LoraOptions(**{key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        wrong = error.errors()[0]
        names = _KEYS | {"target_parameters": "lora_target_parameters", "modules_to_save": "lora_modules_to_save"}
        theirs = next(theirs for theirs, ours in names.items() if ours == wrong["loc"][0])
        raise ConfigError(f"{path}: {theirs} is {config[theirs]!r}: {wrong['msg']}.") from None
    for target in options.lora_target_parameters:
        if parameters is not None and not any(is_target(name, target) for name in parameters):
            known = ", ".join(dict.fromkeys(".".join(name.rsplit(".", 3)[-3:]) for name in parameters))
            raise ConfigError(
                f"{path}: target_parameters is {brief(config['target_parameters'])}: {target!r} is no parameter of "
                f"this model's experts. {f'It has {known}' if known else MERGE_THERE}."
            )
    base = config.get("base_model_name_or_path")
    return _Config(
        config,
        options,
        _selection(config, path),
        base if isinstance(base, str) else "",
        bool(config.get("ensure_weight_tying")),
    )


class _Selected(BaseModel):
    """The keys of PEFT that say which modules, and parameters of other modules, have an adapter."""

    model_config = ConfigDict(extra="ignore", frozen=True, strict=True)

    target_parameters: list[str] | None = None
    target_modules: str | list[str] | None
    exclude_modules: str | list[str] | None = None
    layers_to_transform: int | list[int] | None = None
    layers_pattern: str | list[str] | None = None
    modules_to_save: list[str] | None = None

    @field_validator("target_modules")
    @classmethod
    def _some(cls, value: Any, info: ValidationInfo) -> Any:
        if not value and not info.data.get("target_parameters"):
            raise ValueError("names no module")
        return value

    @field_validator("target_modules", "exclude_modules", "layers_pattern", "modules_to_save")
    @classmethod
    def _compiling(cls, value: Any, info: ValidationInfo) -> Any:
        are_patterns = isinstance(value, str) or info.field_name in ("layers_pattern", "modules_to_save")
        for pattern in ([value] if isinstance(value, str) else value or []) if are_patterns else []:
            try:
                check_pattern(pattern)
            except re.error as error:
                raise ValueError(f"{brief(pattern)} is no regular expression: {error}") from None
        return value


def _selection(config: Mapping[str, Any], path: Path) -> Selection:
    try:
        given = _Selected.model_validate(config)
    except ValidationError as error:
        wrong = error.errors()[0]
        key = str(wrong["loc"][0])
        raise ConfigError(
            f"{path}: {key} is {brief(config.get(key))}: {wrong['msg']}. Name the adapter's modules."
        ) from None
    selected = given.model_dump(exclude={"target_parameters"})
    by_weight = [n.removesuffix(WEIGHT) for n in given.target_parameters or () if n.endswith(WEIGHT)]
    return Selection(**{key: value for key, value in selected.items() if value is not None}, by_weight=by_weight)


def _read_tensors(folder: Path, config: _Config, parameters: Parameters) -> dict[str, Tensor]:
    """By name: matrices as `module.lora_A`, whole weights as in a checkpoint."""
    path = folder / TENSORS_FILE
    tensors: dict[str, Tensor] = {}
    for name, tensor in read_peft_tensors(folder).items():
        module = name.removesuffix(_SUFFIX)
        if module.endswith(_KINDS) and tensor.dim() == 2:
            holder, kind = module_of(module), module[-len(_KINDS[0]) :]
            if parameter := experts.parameter_of(holder, config.options.lora_target_parameters, parameters):
                rank, m = config.options.rank_of(parameter), parameters[parameter]
                stack, tensor = experts.in_run(f"{path}: {name}", kind, tensor, rank, m)
                tensors[parameter + stack] = tensor
                continue
            _check_selected(path, module_of(module), config.selection)
            if module in tensors:
                raise ConfigError(f"{path}: {name} is there twice, with and without {_SUFFIX}. Remove one of them.")
            tensors[module] = tensor
        elif any(is_saved(module_of(name), saved) for saved in config.options.lora_modules_to_save) or (
            config.is_tied and name == _HEAD
        ):
            tensors[name] = tensor
        else:
            why = (
                "PEFT saves it so beside an adapter whose base got a new vocabulary (resize_token_embeddings). "
                if module_of(name).endswith((EMBEDDING, HEAD))
                else ""
            )
            raise ConfigError(
                f"{path}: {name} is neither a matrix of a LoRA adapter of linear projections nor of modules_to_save. "
                f"{why}{MERGE_THERE}."
            )
    return tensors


def _check_selected(path: Path, module: str, selection: Selection) -> None:
    """Raise ConfigError for a matrix that PEFT would leave out."""
    if not selection.has(module, HEAD):
        raise ConfigError(
            f"{path}: holds an adapter of {module}, which {CONFIG_FILE} does not select (target_modules, "
            "exclude_modules, layers_to_transform, modules_to_save): PEFT leaves it out. Name it there, or remove its "
            "tensors."
        )
