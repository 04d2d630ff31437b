"""Definitions of the loaded plugins by kind and name, each with its origin.

Built once at start by `discovery.load_registry` and never changed. The order of plugins does not matter: two
definitions of the same kind and name are a conflict, which is refused when a run uses that name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from pydantic import BaseModel

from ..api import (
    AdapterDef,
    CheckpointFormDef,
    DatasetFormatDef,
    Definition,
    ExportFormatDef,
    Finding,
    KernelDef,
    LauncherDef,
    LossDef,
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
from ..errors import ConfigError, PluginError
from ..front_end import front_end
from ..origin import Origin
from ..words import fold, nearest
from .attribution import attributed
from .conflicts import option_conflicts, rivals
from .hookspecs import KINDS
from .provided import CORE, FLAT_OPTIONS, Plugin, Provided, State

D = TypeVar("D", bound=Definition)

_KIND: Final[Mapping[type[Definition], str]] = {definition: kind for kind, definition in KINDS.items()}

_ALTERNATIVES: Final = ("recipe", "optimizer")
"""Kinds of which a run needs exactly one, selected by the key of the same name: an installed one may do as well."""

REFERENCE: Final = "reference"
"""Provider of an op without a kernel: the torch reference of its OpDef."""


@dataclass(frozen=True)
class Resolved:
    """The kernel that runs an op.

    kernel    None for the torch reference
    refusals  the reasons of the kernels of its kind that do not support it
    others    distributions whose kernels support it too: the key `kernels` can name them
    """

    kernel: KernelDef | None
    provider: str
    refusals: tuple[str, ...] = ()
    others: tuple[str, ...] = ()


def _named(definition: type[D]) -> Callable[[Registry, str], D]:
    """Return the method of `Registry` that returns the definition of this type with a name, as `source` finds it."""

    def find(registry: Registry, name: str) -> D:
        found: D = registry.source(_KIND[definition], name).definition
        return found

    return find


class Registry:
    """Definitions of all loaded plugins.

    plugins     every entry point found, loaded or not
    provided    the definitions of the loaded ones
    diagnose    SystemInfo -> the findings of all plugins, for `surogate doctor`
    remarks     lines about loaded plugins, and about words of SUROGATE_PLUGINS that match no plugin
    conflicts   what two plugins provide, a sentence each. Only a run that uses it is refused.
    """

    def __init__(
        self,
        plugins: Sequence[Plugin],
        provided: Iterable[Provided],
        diagnose: Callable[[SystemInfo], list[tuple[Plugin, Finding]]],
        remarks: Sequence[str] = (),
    ) -> None:
        self.plugins = tuple(plugins)
        self.provided = tuple(map(_attributed, provided))
        self.diagnose = diagnose
        self.remarks = tuple(remarks)
        self.option_conflicts: Mapping[str, str] = dict(option_conflicts(self.provided))
        self._rivals = rivals(self.provided)
        self._by_name: dict[str, dict[str, Provided]] = {kind: {} for kind in KINDS}
        for item in self.provided:
            if item.kind != "kernel":
                self._by_name[item.kind].setdefault(fold(item.name), item)
        self._kernels: dict[str, list[Provided]] = {}
        for item in self.provided:
            if item.kind == "kernel":
                self._kernels.setdefault(item.name, []).append(item)
        self.ops: Mapping[str, OpDef] = {item.name: item.definition for item in self._by_name["op"].values()}

    @property
    def notices(self) -> tuple[str, ...]:
        """A line for each plugin that failed to load, then the remarks."""
        failed = (plugin for plugin in self._unloaded() if plugin.state is not State.BLOCKED)
        return (*(f"plugin '{p.name}' of {p} is not loaded: {p.reason}" for p in failed), *self.remarks)

    @property
    def conflicts(self) -> tuple[str, ...]:
        return (*self._rivals.values(), *self.option_conflicts.values())

    def refuse_rivals(self, what: str, name: str) -> None:
        """Raise PluginError if two plugins provide this: a kind and name, an architecture, a key of a weight format."""
        if conflict := self._rivals.get((what, fold(name))):
            raise PluginError(conflict)

    # ------------------------------------------------------------------------------------------------------- by name

    def names(self, kind: str) -> list[str]:
        """Return the names of a kind, sorted. For kernels: the kinds of ops that they serve."""
        return sorted({item.name for item in self.provided if item.kind == kind})

    recipe = _named(RecipeDef)
    optimizer = _named(OptimizerDef)
    loss = _named(LossDef)
    adapter = _named(AdapterDef)
    offload = _named(OffloadDef)
    lowering = _named(LoweringDef)
    launcher = _named(LauncherDef)
    export_format = _named(ExportFormatDef)

    def source(self, kind: str, name: str) -> Provided:
        """Return the definition of this kind and name ("-" and "_" are equal) with the plugin that provides it.

        Raises PluginError if none does (`missing`), or if two do.
        """
        self.refuse_rivals(kind, name)
        found = self._by_name[kind].get(fold(name))
        if found is None:
            raise self.missing(kind, name)
        return found

    def missing(self, kind: str, name: str) -> PluginError:
        """Return the error for a name that no loaded plugin provides: what is installed, what failed, what to do."""
        text = (
            f"{kind}: {name} — no installed plugin provides it. Installed: {', '.join(self.names(kind)) or 'none'}."
            f"{self._unloaded_hint()}"
        )
        unloaded = self._unloaded()
        if any(fold(name) == fold(p.name) or fold(p.distribution).endswith(f"_{fold(name)}") for p in unloaded):
            return PluginError(text)
        if package := front_end().package(kind, fold(name)):
            text += f" Try: pip install {package}"
            if kind in _ALTERNATIVES and self.names(kind):
                text += f", or {kind}: {self.names(kind)[0]}"
        return PluginError(text)

    def _unloaded(self) -> list[Plugin]:
        return [plugin for plugin in self.plugins if plugin.state is not State.LOADED]

    def _unloaded_hint(self) -> str:
        unloaded = [f"{plugin.name} of {plugin} ({plugin.state}: {plugin.reason})" for plugin in self._unloaded()]
        return f" Installed but not loaded: {'; '.join(unloaded)}." if unloaded else ""

    # -------------------------------------------------------------------------------------------------------- models

    def model_for(self, config_json: Mapping[str, Any], head: Callable[[ModelDef], ModelDef] = lambda m: m) -> ModelDef:
        """Return the model for a checkpoint with `head` put on it, by `architectures` of config.json or `model_type`.

        Raises ConfigError, with what the file says and what is supported, if there is none.
        """
        named = config_json.get("architectures")
        architectures = [str(name) for name in named] if isinstance(named, list) else []
        model_type = config_json.get("model_type")
        models: list[ModelDef] = [head(item.definition) for item in self._by_name["model"].values()]
        asked = [("architecture", name) for name in architectures] or [("model type", str(model_type))]
        for kind, name in asked:
            for model in models:
                if name in (model.architectures if architectures else model.model_types):
                    self.refuse_rivals(kind, name)
                    self.refuse_rivals("model", model.name)
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
        return {item.name: item.definition for item in self._by_name["format"].values()}

    def weight_formats(self) -> Mapping[str, WeightFormatDef]:
        return {item.name: item.definition for item in self._by_name["weight format"].values()}

    def checkpoint_forms(self) -> Mapping[str, CheckpointFormDef]:
        return {item.name: item.definition for item in self._by_name["checkpoint form"].values()}

    def export_formats(self) -> Mapping[str, ExportFormatDef]:
        return {item.name: item.definition for item in self._by_name["export format"].values()}

    def launchers(self) -> Mapping[str, LauncherDef]:
        return {item.name: item.definition for item in self._by_name["launcher"].values()}

    # ------------------------------------------------------------------------------------------------ ops and kernels

    def kernel_for(self, op: Op, target: Target, recipe: str, chosen: Mapping[str, str] | None = None) -> Resolved:
        """Choose what runs `op` on `target`. Within a distribution it is the first of its kernels that supports the op.

        chosen  {kind of op: distribution} of the key `kernels`, which comes first. Then the recipe's own distribution,
                those of `RecipeDef.kernels_of`, the one that defines the op, and any other.

        Raises ConfigError if the chosen distribution cannot serve the op, and PluginError if it is left to two others
        to serve it. If no kernel supports the op, the result is the torch reference, with the reasons of the kernels.
        """
        recipes = (recipe, *self.recipe(recipe).kernels_of)
        owners = (*(("recipe", name) for name in recipes), ("op", op.kind))
        order = [self.source(*owner).plugin.distribution for owner in owners]
        refusals: list[tuple[str, str]] = []
        fitting: dict[str, Provided] = {}
        for item in self._kernels.get(op.kind, ()):
            if reason := refusal(item.definition, self.ops[op.kind], op, target):
                refusals.append((item.plugin.distribution, f"{item.plugin.distribution}: {reason}"))
            else:
                fitting.setdefault(fold(item.plugin.distribution), item)
        wanted = (chosen or {}).get(op.kind)
        if wanted and target.device.sm is not None:
            if fold(wanted) not in fitting:
                own = [reason for distribution, reason in refusals if fold(distribution) == fold(wanted)]
                raise ConfigError(f"kernels: {op.kind}: {'; '.join(own)}. Name another package, or remove the entry.")
            order = [wanted]
        reasons = tuple(reason for _, reason in refusals)
        if not fitting:
            return Resolved(None, REFERENCE, reasons)
        ranked = [fitting[key] for name in order if (key := fold(name)) in fitting]
        best, *others = dict.fromkeys([*ranked, *fitting.values()])
        if not ranked and others:
            raise PluginError(
                f"kernels of {op.kind} are provided by {best.plugin} and {others[0].plugin}. Choose one: "
                f"kernels: {{{op.kind}: {best.plugin.distribution}}}"
            )
        also = tuple(item.plugin.distribution for item in others)
        return Resolved(best.definition, best.plugin.distribution, reasons, also)

    def check_kernel_choices(self, chosen: Mapping[str, str]) -> None:
        """Raise ConfigError unless each distribution in `chosen`, by kind of op, has a kernel of that kind."""
        for kind, distribution in chosen.items():
            if kind not in self.ops:
                near = nearest(kind, self.ops)
                hint = f"; did you mean {near}?" if near else "."
                raise ConfigError(f"kernels: {kind}: no installed plugin defines such an op{hint}")
            have = sorted({item.plugin.distribution for item in self._kernels.get(kind, ())})
            if fold(distribution) not in map(fold, have):
                raise ConfigError(
                    f"kernels: {kind}: {distribution} has no kernel for this op. Packages that have one: "
                    f"{', '.join(have) or 'none'}."
                )


def _attributed(item: Provided) -> Provided:
    plugin = item.plugin
    if plugin.distribution in (CORE, front_end().distribution) or item.definition.origin is not None:
        return item
    origin = Origin(item.kind, item.name, plugin.distribution, plugin.version, plugin.module)
    return replace(item, definition=attributed(item.definition, origin))


# ------------------------------------------------------------------------------------------------------------- lookups


def refusal(kernel: KernelDef, definition: OpDef, op: Op, target: Target) -> str:
    """Return why a kernel cannot serve an op, or "" if it can."""
    if more_ins := definition.not_taken(op, kernel.takes):
        return f"does not take {', '.join(more_ins)}"
    wanted, dtypes = kernel.dtypes, tuple(value.dtype for value in (*op.ins, *op.outs))
    if wanted[-1:] == ("...",):  # the dtype before it, any number of times
        wanted = (*wanted[:-1], *wanted[-2:-1] * (len(dtypes) - len(wanted) + 1))
    if len(wanted) != len(dtypes) or any(want not in ("*", have) for want, have in zip(wanted, dtypes, strict=True)):
        return f"supports dtypes ({', '.join(kernel.dtypes)}), the op has ({', '.join(dtypes)})"
    if more := definition.not_implemented(op, kernel.attrs):
        return f"does not implement {', '.join(f'{name}={value!r:.80}' for name, value in more.items())}"
    if (target.device.sm or 0) < kernel.sm:
        return f"needs a GPU of SM{kernel.sm} or newer, not {target.device.title}"
    support = kernel.supports(op, target)
    return "" if support.ok else support.reason or "refuses without a reason"
