"""Modules that are trained in full with the adapter: PEFT's `modules_to_save`.

PEFT trains a copy of such a module. Here the model's own weight is trained, and the adapter's files hold it whole.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

from surogate_core.api import ConfigError, Program, WeightMap

from .matching import is_saved

EMBEDDING, HEAD = "embed_tokens", "lm_head"
"""Names in transformers and PEFT of the two modules that share one weight where embeddings are tied."""


def is_trained(stored: WeightMap, names: Sequence[str]) -> bool:
    """Whether `lora_modules_to_save` names the module that a param is stored in."""
    return any(is_saved(module_of(tensor.name), name) for tensor in stored.tensors for name in names)


def check(forward: Program, weights: Sequence[WeightMap], names: Sequence[str]) -> None:
    """Raise ConfigError for names that a model does not have, or that cannot be trained as PEFT would understand it."""
    if not names:
        return
    modules: dict[str, list[str]] = {}
    for stored in weights:
        for tensor in stored.tensors:
            modules.setdefault(module_of(tensor.name), []).append(stored.param)
    readers = Counter(v.name for op in forward.ops for v in op.ins if v.role == "param")
    shared = [module for module, params in modules.items() if any(readers[param] > 1 for param in params)]
    if HEAD not in modules:
        modules.update((HEAD, modules[module]) for module in shared if module.endswith(EMBEDDING))
    routers = {m.param for m in weights if m.kind == "router"}
    inside = {v.name for op in forward.ops if op.kind == "linear" for v in op.ins[1:]} - routers
    inside.update(m.param for m in weights if len(m.tensors) > 1 or m.parameter)  # experts, no modules of their own
    whole = [module for module, params in modules.items() if not inside.intersection(params)]
    _check_names(names, list(modules), whole)
    for module in shared:
        ends = (module, HEAD) if module.endswith(EMBEDDING) else (module,)
        chosen = [end for end in ends if any(is_saved(end, name) for name in names)]
        if len(chosen) == 1:
            raise ConfigError(
                f"lora_modules_to_save: {chosen[0]} shares its weight with another module, and tied embeddings stay "
                f"tied. Name both, {EMBEDDING} and {HEAD}, or neither."
            )


def _check_names(names: Sequence[str], modules: Sequence[str], whole: Sequence[str]) -> None:
    known = ", ".join(dict.fromkeys(module.rpartition(".")[2] for module in whole))
    parents = {module.rpartition(".")[0] for module in modules}
    for name in names:
        found = [module for module in modules if is_saved(module, name)]
        if not found or any(is_saved(parent, name) for parent in parents):
            raise ConfigError(
                f"lora_modules_to_save: {name!r} is no module with a weight of its own. It can be {known}."
            )
        if not set(found) <= set(whole):
            raise ConfigError(
                f"lora_modules_to_save: {name!r} is a linear projection of the blocks or of experts, trained by an "
                f"adapter (lora_target_modules) or, with lora: false, all in full. It can be {known}."
            )


def refuse_untrained(untrained: Sequence[WeightMap], names: Sequence[str]) -> None:
    """Raise ConfigError for a module with a tensor that no run trains: PEFT loads modules whole, its buffers too."""
    for tensor in (tensor for stored in untrained for tensor in stored.tensors):
        for name in names:
            if is_saved(module_of(tensor.name), name):
                raise ConfigError(
                    f"lora_modules_to_save: {name!r} has {tensor.name}, which is never trained, and PEFT trains "
                    f"modules as a whole. Adapt its matrix, lora_target_modules: [{name}], or leave it out."
                )


def module_of(tensor: str) -> str:
    """The module that a tensor of a checkpoint belongs to."""
    return tensor.rpartition(".")[0]
