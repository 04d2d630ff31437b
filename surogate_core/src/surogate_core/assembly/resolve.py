"""Chooses the kernel of every op, once, before data are touched.

Planner, binder, report and finite check read the result and do not choose again.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from ..api import DeviceInfo, KernelDef, Op, OpDef, Target
from ..api.compiled import problem
from ..errors import ConfigError
from ..front_end import called
from ..machine.local_device import USE_THE_CPU
from ..plugins.registry import REFERENCE, Resolved
from ..program.op import Signature

KernelFor = Callable[[Op], Resolved]
"""Chooses what runs an op."""


@dataclass(frozen=True, eq=False)
class KernelTable:
    """The kernel or reference that runs each op of the programs on `target`.

    `target` is None for programs that are assembled for no device; their ops run as torch references. `by_signature`
    pairs each signature with an op that has it, and with what runs such ops.
    """

    target: Target | None
    ops: Mapping[str, OpDef]
    by_signature: Mapping[Signature, tuple[Op, Resolved]]

    def __getitem__(self, op: Op) -> Resolved:
        return self.by_signature[op.signature][1]

    def kernel(self, op: Op) -> KernelDef | None:
        """Return the compiled kernel of `op`, or None if its torch reference runs."""
        return self[op].kernel

    def workspace(self, op: Op) -> int:
        """Return the bytes of scratch that `op` needs."""
        return self._workspaces[op.signature]

    @cached_property
    def _workspaces(self) -> Mapping[Signature, int]:
        target = self.target
        return {
            signature: by.kernel.workspace(op, target) if by.kernel and target else self.ops[op.kind].workspace(op)
            for signature, (op, by) in self.by_signature.items()
        }

    @cached_property
    def providers(self) -> Mapping[str, str]:
        """{kind of op: distribution of its kernel}. REFERENCE if any op of the kind has no kernel."""
        found: dict[str, str] = {}
        for op, resolved in self.by_signature.values():
            if op.kind not in found or resolved.kernel is None:
                found[op.kind] = resolved.provider
        return dict(sorted(found.items()))

    @cached_property
    def others(self) -> Mapping[str, tuple[str, ...]]:
        """{kind of op: further distributions whose kernels support it}, of kinds that have any."""
        found = {op.kind: resolved.others for op, resolved in self.by_signature.values() if resolved.others}
        return dict(sorted(found.items()))

    @cached_property
    def refusals(self) -> Mapping[str, tuple[str, ...]]:
        """{kind of op without a kernel: why no kernel serves it}, every reason once."""
        found: dict[str, dict[str, None]] = {}
        for op, resolved in self.by_signature.values():
            if resolved.kernel is None:
                found.setdefault(op.kind, {}).update(dict.fromkeys(resolved.refusals))
        return {kind: tuple(reasons) for kind, reasons in found.items()}

    @cached_property
    def refused(self) -> Mapping[tuple[str, ...], list[str]]:
        """{reasons: the kinds of ops, sorted, that no kernel serves for these reasons}."""
        found: dict[tuple[str, ...], list[str]] = {}
        for kind, reasons in sorted(self.refusals.items()):
            found.setdefault(reasons or ("no installed package has a kernel for it",), []).append(kind)
        return found

    @property
    def in_torch(self) -> tuple[str, ...]:
        """The kinds of ops that a GPU runs in plain torch, if it runs them. Estimates take these as compiled kernels.
        Empty on a CPU, whose rates are those of torch."""
        sm = self.target.device.sm if self.target else None
        return () if sm is None else tuple(sorted(self.refusals))

    @cached_property
    def notices(self) -> tuple[str, ...]:
        """The notices of the kernels for a user who plans a run, each line once."""
        target = self.target
        if target is None:
            return ()
        found = self.by_signature.values()
        lines = (resolved.kernel.notice(op, target) for op, resolved in found if resolved.kernel is not None)
        return tuple(dict.fromkeys(filter(None, lines)))

    @cached_property
    def modules(self) -> frozenset[str]:
        """Import names of the compiled modules that the kernels are in."""
        kernels = (resolved.kernel for _, resolved in self.by_signature.values())
        return frozenset(kernel.module for kernel in kernels if kernel and kernel.module)


def resolve(
    ops: Iterable[Op], kernel_for: KernelFor, target: Target | None, definitions: Mapping[str, OpDef]
) -> KernelTable:
    """Choose what runs each of `ops`. Ops of equal signature run by the same kernel."""
    alike = {op.signature: op for op in ops}
    return KernelTable(target, definitions, {signature: (op, kernel_for(op)) for signature, op in alike.items()})


def by_references(op: Op) -> Resolved:
    return Resolved(None, REFERENCE)


def idle_modules(kernels: KernelTable) -> Mapping[str, str]:
    """Return the compiled modules of `kernels` that cannot run on its GPU: {import name: why}. Empty for a CPU."""
    sm = kernels.target.device.sm if kernels.target else None
    if sm is None:
        return {}
    found = {module: problem(module, sm) for module in sorted(kernels.modules)}
    return {module: why for module, why in found.items() if why}


def refuse_missing_kernels(kernels: KernelTable, device: DeviceInfo) -> None:
    """Raise ConfigError if a compiled module cannot run on the GPU, or if no kernel serves an op. Nothing on a CPU."""
    if idle := idle_modules(kernels):
        raise ConfigError(idle_kernels(device, idle))
    if missing := unserved_ops(kernels):
        raise ConfigError(missing)


def idle_kernels(device: DeviceInfo, idle: Mapping[str, str]) -> str:
    """Return one line that says what `idle_modules` found, and what to do."""
    modules = ", ".join(f"{module} {why}" for module, why in idle.items())
    return (
        f"kernels for {device.title} (SM{device.sm}) are missing: {modules}. Compile them: `make install` in a "
        "checkout, or reinstall these packages with SUROGATE_CUDA=on, which uses nvcc of CUDA 13 from the PATH or from "
        f"NVIDIA's wheels; or {USE_THE_CPU}; or set {called('allow_reference')} (slow)."
    )


def unserved_ops(kernels: KernelTable) -> str:
    """Return the ops that no kernel serves on a GPU, with the reasons of every kernel that was considered.

    Empty on a CPU, or if every op has a kernel.
    """
    device = kernels.target.device if kernels.target else None
    if device is None or device.sm is None or not kernels.refused:
        return ""
    lines = (f"  {', '.join(kinds)}: {'; '.join(reasons)}" for reasons, kinds in kernels.refused.items())
    return "\n".join(
        [
            f"{device.title}: no compiled kernel serves these ops. Change what they are refused for (dtypes by "
            f"{called('model_dtype')}: bf16), install a package that has one, or set {called('allow_reference')} "
            "(slow).",
            *lines,
        ]
    )
