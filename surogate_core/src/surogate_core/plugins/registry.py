"""What the loaded plugins provide: definitions by kind and name, each with its origin.

Built once at start by `discovery.load_registry` and never changed. The order of plugins does not matter: two
definitions of the same kind and name are a conflict, which is refused at start.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Any, Final

from pydantic import BaseModel
from pydantic.fields import FieldInfo

from ..api import (
    AdapterDef,
    DatasetFormatDef,
    Definition,
    Finding,
    KernelDef,
    LauncherDef,
    LoggerDef,
    LoweringDef,
    ModelDef,
    OffloadDef,
    Op,
    OpDef,
    OptimizerDef,
    RecipeDef,
    SystemInfo,
    Target,
    WeightFormatDef,
)
from ..config.keys import DISTRIBUTIONS
from ..errors import ConfigError, PluginError
from ..origin import Origin
from .attribution import attributed

KINDS: Final[Mapping[str, type[Definition]]] = {
    "model": ModelDef,
    "op": OpDef,
    "kernel": KernelDef,
    "recipe": RecipeDef,
    "lowering": LoweringDef,
    "adapter": AdapterDef,
    "optimizer": OptimizerDef,
    "weight format": WeightFormatDef,
    "offload": OffloadDef,
    "format": DatasetFormatDef,
    "launcher": LauncherDef,
    "logger": LoggerDef,
}
"""Every kind of thing that a plugin provides, and the class of its definitions."""

HOOKS: Final[Mapping[str, str]] = {
    "surogate_models": "model",
    "surogate_ops": "op",
    "surogate_kernels": "kernel",
    "surogate_recipes": "recipe",
    "surogate_lowerings": "lowering",
    "surogate_adapters": "adapter",
    "surogate_optimizers": "optimizer",
    "surogate_weight_formats": "weight format",
    "surogate_offload_strategies": "offload",
    "surogate_dataset_formats": "format",
    "surogate_launchers": "launcher",
    "surogate_loggers": "logger",
}
"""The hooks that provide definitions, and the kind of each."""

CORE: Final = "surogate-core"
"""The distribution whose errors are ours."""

FLAT_OPTIONS: Final = ("recipe", "adapter", "weight format", "optimizer", "offload", "launcher", "logger")
"""Kinds whose options are top-level keys of the YAML file. Those of a format are keys of its dataset's entry."""

_ALTERNATIVES: Final = ("recipe", "optimizer")
"""Kinds of which a run needs exactly one, selected by the key of the same name: an installed one may do as well."""

REFERENCE: Final = "reference"
"""Provider of an op without a kernel: the torch reference of its OpDef."""


class State(StrEnum):
    """The result of loading an entry point."""

    LOADED = "loaded"
    BLOCKED = "blocked"
    BROKEN = "broken"
    DUPLICATE = "duplicate"
    WRONG_API = "wrong API"


@dataclass(frozen=True)
class Plugin:
    """An entry point of the group `surogate`. If it is not loaded, `reason` is a sentence and `error` the cause."""

    name: str
    distribution: str
    version: str
    module: str
    state: State = State.LOADED
    reason: str = ""
    error: BaseException | None = None

    def __str__(self) -> str:
        return f"{self.distribution} {self.version}"


@dataclass(frozen=True)
class Provided:
    """A definition and the plugin that provides it."""

    kind: str
    name: str
    definition: Any
    plugin: Plugin


@dataclass(frozen=True)
class Resolved:
    """What runs an op. kernel: None for the torch reference. refusals: why the other kernels of its kind do not."""

    kernel: KernelDef | None
    provider: str
    refusals: tuple[str, ...] = ()


class Registry:
    """Definitions of all loaded plugins.

    plugins     every entry point found, loaded or not
    provided    the definitions of the loaded ones
    diagnose    SystemInfo -> the findings of all plugins, for `surogate doctor`
    notices     a line per plugin that failed to load, and per word of SUROGATE_PLUGINS that matches no plugin
    conflicts   reasons to refuse to start: see `discovery.load_registry`
    """

    def __init__(
        self,
        plugins: Sequence[Plugin],
        provided: Iterable[Provided],
        diagnose: Callable[[SystemInfo], list[tuple[Plugin, Finding]]],
        notices: Sequence[str] = (),
    ) -> None:
        self.plugins = tuple(plugins)
        self.provided = tuple(map(_attributed, provided))
        self.diagnose = diagnose
        self.notices = tuple(notices)
        self.conflicts = tuple(_conflicts(self.provided))
        self._by_name: dict[str, dict[str, Provided]] = {kind: {} for kind in KINDS}
        for item in self.provided:
            if item.kind != "kernel":
                self._by_name[item.kind].setdefault(_key(item.name), item)
        self._kernels: dict[str, list[Provided]] = {}
        for item in self.provided:
            if item.kind == "kernel":
                self._kernels.setdefault(item.name, []).append(item)
        self.ops: Mapping[str, OpDef] = {item.name: item.definition for item in self._by_name["op"].values()}

    # ------------------------------------------------------------------------------------------------------- by name

    def names(self, kind: str) -> list[str]:
        """Return the names of a kind, sorted. For kernels: the kinds of ops that they serve."""
        return sorted({item.name for item in self.provided if item.kind == kind})

    def get(self, kind: str, name: str) -> Any:
        """Return the definition of this kind and name ("-" and "_" are equal). Raise the error of `missing` if none."""
        return self.source(kind, name).definition

    def source(self, kind: str, name: str) -> Provided:
        """Return the definition of this kind and name with the plugin that provides it."""
        found = self._by_name[kind].get(_key(name))
        if found is None:
            raise self.missing(kind, name)
        return found

    def missing(self, kind: str, name: str) -> PluginError:
        """Return the error for a name that no loaded plugin provides: what is installed, what failed, what to do."""
        text = (
            f"{kind}: {name} — no installed plugin provides it. Installed: {', '.join(self.names(kind)) or 'none'}."
            f"{self._unloaded_hint()}"
        )
        named = [plugin for plugin in self._unloaded() if _may_provide(plugin, name)]
        if named:
            return PluginError(text, distribution=named[0].distribution, version=named[0].version)
        if (kind, _key(name)) in DISTRIBUTIONS:
            text += f" Try: pip install {DISTRIBUTIONS[kind, _key(name)]}"
            if kind in _ALTERNATIVES and self.names(kind):
                text += f", or {kind}: {self.names(kind)[0]}"
        return PluginError(text)

    def _unloaded(self) -> list[Plugin]:
        return [plugin for plugin in self.plugins if plugin.state is not State.LOADED]

    def _unloaded_hint(self) -> str:
        unloaded = [f"{plugin.name} of {plugin} ({plugin.state}: {plugin.reason})" for plugin in self._unloaded()]
        return f" Installed but not loaded: {'; '.join(unloaded)}." if unloaded else ""

    # -------------------------------------------------------------------------------------------------------- models

    def model_for(self, config_json: Mapping[str, Any]) -> ModelDef:
        """Return the model for a checkpoint, by `architectures` of its config.json, else by `model_type`.

        Raises ConfigError, with what the file says and what is supported, if there is none.
        """
        named = config_json.get("architectures")
        architectures = [str(name) for name in named] if isinstance(named, list) else []
        model_type = config_json.get("model_type")
        models: list[ModelDef] = [item.definition for item in self._by_name["model"].values()]
        for architecture in architectures:
            for model in models:
                if architecture in model.architectures:
                    return model
        if not architectures:
            for model in models:
                if model_type in model.model_types:
                    return model
        supported = sorted(name for model in models for name in model.architectures)
        raise ConfigError(
            f"model: config.json has architectures {architectures} and model_type {model_type!r}, which no installed "
            f"plugin builds. Supported: {', '.join(supported) or 'none'}.{self._unloaded_hint()} Use one of these, or "
            f"install the package that provides it (pip install surogate brings the standard models)."
        )

    # ------------------------------------------------------------------------------------------------------- options

    def options_models(self) -> Mapping[tuple[str, str], type[BaseModel]]:
        """Return options by (kind, name), of the kinds whose options are top-level keys of the YAML file."""
        return {
            (kind, item.name): item.definition.options for kind in FLAT_OPTIONS for item in self._by_name[kind].values()
        }

    def failed(self, kind: str, name: str, function: str, cause: BaseException) -> PluginError | None:
        """Return `cause`, raised in `function` of a definition, as an error that names the plugin. None for core."""
        origin: Origin | None = self.source(kind, name).definition.origin
        return origin.failed(function, cause) if origin else None

    def dataset_formats(self) -> Mapping[str, DatasetFormatDef]:
        """Return dataset formats by name."""
        return {item.name: item.definition for item in self._by_name["format"].values()}

    def weight_formats(self) -> Mapping[str, WeightFormatDef]:
        """Return weight formats by name."""
        return {item.name: item.definition for item in self._by_name["weight format"].values()}

    # ------------------------------------------------------------------------------------------------ ops and kernels

    def op_owner(self, kind: str) -> str:
        """Return the distribution that defines this kind of op."""
        return self.source("op", kind).plugin.distribution

    def kernel_for(self, op: Op, target: Target, recipe: str) -> Resolved:
        """Choose what runs `op` on `target`: a kernel of the recipe's plugin, else of the op's plugin, else of another.

        Within a plugin it is the first kernel of its list that supports the op. Raises PluginError if two plugins rank
        equal. If no kernel supports the op, the result is the torch reference, with the reasons of the kernels.
        """
        home = self.source("recipe", recipe).plugin.distribution
        owner = self.op_owner(op.kind)
        refusals: list[str] = []
        fitting: dict[int, dict[str, Provided]] = {}
        for item in self._kernels.get(op.kind, ()):
            reason = refusal(item.definition, self.ops[op.kind], op, target)
            if reason:
                refusals.append(f"{item.plugin.distribution}: {reason}")
                continue
            distribution = item.plugin.distribution
            rank = 0 if distribution == home else 1 if distribution == owner else 2
            fitting.setdefault(rank, {}).setdefault(distribution, item)
        if not fitting:
            return Resolved(None, REFERENCE, tuple(refusals))
        best = list(fitting[min(fitting)].values())
        if len(best) > 1:
            raise PluginError(_conflict("kernel", op.kind, best[0].plugin, best[1].plugin))
        return Resolved(best[0].definition, best[0].plugin.distribution, tuple(refusals))


def _attributed(item: Provided) -> Provided:
    plugin = item.plugin
    if plugin.distribution == CORE:
        return item
    hook = next(hook for hook, kind in HOOKS.items() if kind == item.kind)
    origin = Origin(item.kind, item.name, plugin.distribution, plugin.version, plugin.module, hook)
    return replace(item, definition=attributed(item.definition, origin))


# ----------------------------------------------------------------------------------------------------------- conflicts


def _conflicts(provided: Sequence[Provided]) -> Iterator[str]:
    """Yield every reason to refuse to start: a sentence with both sides and how to switch one off."""
    seen: dict[tuple[str, str], Provided] = {}
    for item in provided:
        for what, name in _claims(item):
            first = seen.setdefault((what, _key(name)), item)
            if first is not item:
                yield _conflict(what, name, first.plugin, item.plugin)
    options: dict[str, Provided] = {}
    for item, key in _flat_options(provided):
        first = options.setdefault(key, item)
        if first.plugin.distribution != item.plugin.distribution and not _alike(first, item, key):
            yield _conflict("option", key, first.plugin, item.plugin)


def _claims(item: Provided) -> Iterator[tuple[str, str]]:
    """Yield the names that only one item may have. Several kernels may serve one op: `kernel_for` ranks them."""
    if item.kind == "kernel":
        return
    yield item.kind, item.name
    if item.kind == "model":
        yield from (("architecture", name) for name in item.definition.architectures)
        yield from (("model type", name) for name in item.definition.model_types)
    if item.kind == "weight format":
        yield "key of a weight format", item.definition.key


def _flat_options(provided: Iterable[Provided]) -> Iterator[tuple[Provided, str]]:
    for item in provided:
        if item.kind in FLAT_OPTIONS:
            for name, field in item.definition.options.model_fields.items():
                yield item, field.alias or name


def _alike(first: Provided, second: Provided, key: str) -> bool:
    """Return whether two plugins share an option: both inherit it from one options model, or they are of one kind, of
    which a run uses one, and declare the same type, bounds and default.
    """
    if _declares(first, key) is _declares(second, key):
        return True
    if first.kind != second.kind:
        return False
    one, other = (_field(item, key) for item in (first, second))
    return (one.annotation, one.metadata, one.default) == (other.annotation, other.metadata, other.default)


def _field(item: Provided, key: str) -> FieldInfo:
    options: type[BaseModel] = item.definition.options
    return next(field for name, field in options.model_fields.items() if key == (field.alias or name))


def _declares(item: Provided, key: str) -> type:
    """Return the class that first declares an option."""
    options: type[BaseModel] = item.definition.options
    for cls in reversed(options.__mro__):
        if key in inspect.get_annotations(cls):
            return cls
    return options


def _conflict(what: str, name: str, first: Plugin, second: Plugin) -> str:
    if first.distribution == second.distribution:
        return f"{what} '{name}' is provided twice by {first}; {_off_switch(second)}"
    return (
        f"{what} '{name}' is provided by {first} and {second}; uninstall one or set "
        f"SUROGATE_PLUGINS=-{_switchable(first, second).distribution}"
    )


def _switchable(first: Plugin, second: Plugin) -> Plugin:
    """Return the side of a conflict that can be switched off. Core itself cannot."""
    return first if second.distribution == CORE else second


def _off_switch(plugin: Plugin) -> str:
    return f"uninstall it or set SUROGATE_PLUGINS=-{plugin.distribution}"


# ------------------------------------------------------------------------------------------------------------- lookups


def _key(name: str) -> str:
    return name.replace("_", "-").lower()


def _may_provide(plugin: Plugin, name: str) -> bool:
    return _key(name) == _key(plugin.name) or _key(plugin.distribution).endswith(f"-{_key(name)}")


def refusal(kernel: KernelDef, definition: OpDef, op: Op, target: Target) -> str:
    """Return why a kernel cannot serve an op, or "" if it can."""
    wanted, dtypes = kernel.dtypes, tuple(value.dtype for value in (*op.ins, *op.outs))
    if wanted[-1:] == ("...",):  # the dtype before it, any number of times
        wanted = (*wanted[:-1], *wanted[-2:-1] * (len(dtypes) - len(wanted) + 1))
    if len(wanted) != len(dtypes) or any(want not in ("*", have) for want, have in zip(wanted, dtypes, strict=True)):
        return f"supports dtypes ({', '.join(kernel.dtypes)}), the op has ({', '.join(dtypes)})"
    if more := definition.not_implemented(op, kernel.attrs):
        return f"does not implement {', '.join(f'{name}={value!r:.80}' for name, value in more.items())}"
    support = kernel.supports(op, target)
    return "" if support.ok else support.reason or "refuses without a reason"
