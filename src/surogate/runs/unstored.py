"""Matrices that a run holds in full precision, although a checkpoint may hold them in the run's weight format."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from surogate_core.api import ParamKind
from surogate_core.assembly.assembly import Assembly
from surogate_core.assembly.weight_maps import special_kinds
from surogate_core.errors import ConfigError

from ..config.schema import STORED_BY
from ..hub.config_json import QUANTIZATION
from .run import Run

_WEIGHT = ".weight"


def remedies(run: Run, assembly: Assembly) -> dict[str, str]:
    """Return {param that the run does not store in its weight format: what to do if a checkpoint holds it so}."""
    kinds = param_kinds(run, assembly)
    trained = {v.name for v in assembly.trainable}
    original = "Use the original checkpoint of this model."
    found = {}
    for m in assembly.weights:
        key = STORED_BY.get(kinds.get(m.param, "matrix"))
        if m.param in trained:
            found[m.param] = f"This run trains it. {original}"
        elif m.param not in assembly.stored:
            found[m.param] = original if key is None else f"Set {key}: true."
    return found


def refuse_unstored(run: Run, assembly: Assembly) -> None:
    """Raise ConfigError if config.json says that the checkpoint's LM head is stored quantized, and the run's is not.

    The lists in config.json are of linear modules. An embedding in another form shows in the files alone.
    """
    config = run.model_config.get(QUANTIZATION)
    if config is None or run.weight_format is None or run.weight_format[0].checkpoints is None:
        return
    kept = run.weight_format[0].checkpoints.kept(config)
    if not isinstance(kept, list | tuple):
        return
    kinds, unstored = param_kinds(run, assembly), remedies(run, assembly)
    for m in assembly.weights:
        for tensor in m.tensors if kinds.get(m.param) == "head" and m.param in unstored else ():
            if not any(_matches(tensor.name.removesuffix(_WEIGHT), str(pattern)) for pattern in kept):
                path = run.model_dir / "config.json"
                raise ConfigError(f"{path}: {QUANTIZATION}: {tensor.name} is stored quantized. {unstored[m.param]}")


def param_kinds(run: Run, assembly: Assembly) -> Mapping[str, ParamKind]:
    return {value.name: kind for value, kind in special_kinds(assembly.only("evaluate"), run.registry.ops).items()}


def _matches(module: str, pattern: str) -> bool:
    """Return whether a pattern is one of the module, or of one that contains it: writers use all of these forms."""
    return fnmatchcase(module, pattern) or module.endswith(pattern) or module.startswith(f"{pattern}.")
