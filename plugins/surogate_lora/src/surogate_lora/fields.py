"""Every field of PEFT's `LoraConfig`, and the values of a saved adapter's that are understood.

A field that is not in the table is refused unless it is off, so that an adapter of a newer PEFT is never misread. The
tests compare the table with the installed PEFT, and each value with PEFT's logits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from reprlib import repr as brief  # a damaged file may hold a list of a million
from typing import Any

from surogate_core.api import ConfigError
from surogate_core.api.peft import OFF, PEFT_TASKS

INITIAL = (True, False, "gaussian", "eva", "orthogonal", "mica")
"""Values of `init_lora_weights` that leave the base's weights alone. What the adapter computes is in its tensors."""

_FROZEN_B = "mica"

_CONVERT = (
    "The adapter's tensors are of a base whose weights it has changed. Convert it in PEFT: "
    "model.save_pretrained(folder, path_initial_model_for_weight_conversion=initial_adapter), or merge it there"
)
_LOFTQ = "It replaces the base's weights by quantized ones. Merge it in PEFT"
MERGE_THERE = "Merge it in PEFT (merge_and_unload), and train the merged model"
_NO_MERGE = "It depends on the text, so that no merged model has its effect. Use it in PEFT"


@dataclass(frozen=True)
class Field:
    """is_known: whether a value is understood. remedy: a sentence, without its full stop, for any other value."""

    is_known: Callable[[Any], bool]
    remedy: str = MERGE_THERE


def _off(remedy: str = MERGE_THERE) -> Field:
    return Field(lambda value: value in OFF, remedy)


_READ = Field(lambda value: True)  # by `files.py`, which checks it
_WITHOUT_EFFECT = Field(lambda value: True)  # on what a saved adapter computes

FIELDS: Mapping[str, Field] = {
    "peft_type": _READ,
    "r": _READ,
    "lora_alpha": _READ,
    "use_rslora": _READ,
    "rank_pattern": _READ,
    "alpha_pattern": _READ,
    "target_modules": _READ,
    "target_parameters": Field(lambda value: value is None or isinstance(value, list)),  # names: by `files.py`
    "exclude_modules": _READ,
    "layers_to_transform": _READ,
    "layers_pattern": _READ,
    "modules_to_save": _READ,
    "ensure_weight_tying": _READ,
    "base_model_name_or_path": _READ,
    "revision": _READ,
    # PEFT's class for a task wraps another model than the causal language model.
    "task_type": Field(
        lambda value: value in (None, *PEFT_TASKS.values()), "Train it in PEFT, or use an adapter of another task"
    ),
    "auto_mapping": _WITHOUT_EFFECT,  # the class of the base
    "peft_version": _WITHOUT_EFFECT,
    "inference_mode": _WITHOUT_EFFECT,  # whether PEFT trains it
    "lora_dropout": _WITHOUT_EFFECT,  # of training alone, where the run's own key counts
    "runtime_config": _WITHOUT_EFFECT,  # where PEFT computes; never saved
    # Used by an initialisation that `init_lora_weights` names, or by one that is off.
    "loftq_config": _WITHOUT_EFFECT,
    "eva_config": _WITHOUT_EFFECT,
    "corda_config": _WITHOUT_EFFECT,
    "lora_ga_config": _WITHOUT_EFFECT,
    "megatron_core": _WITHOUT_EFFECT,
    "qalora_group_size": _WITHOUT_EFFECT,
    "init_lora_weights": Field(lambda value: value is None or value in INITIAL, _CONVERT),
    "bias": Field(lambda value: value in (None, "none")),
    "fan_in_fan_out": _off(),
    "lora_bias": _off(),
    "use_dora": _off(),
    "use_qalora": _off(),
    "use_bdlora": _off(),
    "velora_config": _off(),
    "monteclora_config": _off(_NO_MERGE),
    "kasa_config": _off(),
    "arrow_config": _off(_NO_MERGE),
    "alora_invocation_tokens": _off(_NO_MERGE),
    "trainable_token_indices": _off(),
    "layer_replication": _off("It makes a model of other layers. Write that model first, and train the adapter on it"),
    "megatron_config": _off("Save it from a model of transformers"),
}


def check_fields(config: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError for the first field of an adapter_config.json with a value that is not understood."""
    for name, value in config.items():
        field = FIELDS.get(name)
        if field is None and value not in OFF:
            raise ConfigError(
                f"{path}: {name} is {brief(value)}: a key that is not known, of a newer PEFT perhaps. If it has no "
                "effect on this adapter, remove it from the file."
            )
        if field is not None and not field.is_known(value):
            remedy = _LOFTQ if value == "loftq" else field.remedy
            raise ConfigError(f"{path}: {name} is {brief(value)}, which is not built. {remedy}.")


def check_trainable(config: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError for an adapter that PEFT trains in another way than this package does."""
    value = config.get("init_lora_weights")
    if value == _FROZEN_B:
        raise ConfigError(
            f"{path}: init_lora_weights is {brief(value)}: PEFT trains lora_A alone, and this run would train lora_B "
            "too. Merge the adapter, and train a new one on the merged model."
        )
