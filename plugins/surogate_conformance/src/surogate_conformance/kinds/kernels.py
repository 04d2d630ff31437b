"""Checks of kernels, on the ops of tiny runs that are planned for a device, and on a GPU where there is one."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from surogate_core.api import Call, Comm, KernelDef, Op, OpDef, Support, Target, Value
from surogate_core.errors import ConfigError, SurogateError
from surogate_core.machine.devices import device
from surogate_core.plugins.registry import refusal
from surogate_core.reference.ops import load
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.runtime.bind import as_launches
from surogate_core.runtime.comms.single import SingleComm
from surogate_core.runtime.device import training_device
from surogate_core.testing import binding
from surogate_core.testing.binding import check_reads_attrs
from surogate_core.testing.kernels import relative_error

from ..bench import Bench, Sample
from ..check import NotApplicable, proves
from .ops import examples

MOST = 8
"""Ops that a kernel is run on."""


@dataclass
class Recorder:
    """A `BindContext` without a GPU: every value has an address, and what is bound is kept."""

    target: Target
    stream: int = 0xABC0
    comm: Comm = field(default_factory=SingleComm)
    addresses: dict[Value, int] = field(default_factory=dict)
    words: list[int] = field(default_factory=list)
    workspace: int = 0

    def pointer(self, value: Value) -> int:
        return self.addresses.setdefault(value, 0x10000000 + 0x100000 * len(self.addresses))

    def call(self, function: Callable[..., None], *arguments: Any) -> Call:
        return function, (*(self.pointer(a) if isinstance(a, Value) else a for a in arguments), self.stream)

    def table(self, words: Sequence[int]) -> int:
        self.words += words
        return 0xAB000000

    def notice(self, text: str) -> None:
        assert text.strip(), "a notice is empty"

    def autotune_cache(self, name: str, load: Callable[..., None], dump: Callable[[], Mapping[str, str]]) -> None:
        load({})


def _ops(kernel: KernelDef, bench: Bench) -> list[Op]:
    """Return the ops of the kernel's kind in runs planned for the device and in examples, one for each signature.

    Runs select what the subject and its neighbours provide. Raises NotApplicable if the kernel serves none.
    """
    target, definition = Target(device(bench.target)), bench.registry.ops.get(kernel.op)
    if definition is None:
        raise NotApplicable(f"no installed plugin defines the op {kernel.op}")
    found = bench.once("planned ops", lambda: list(_planned(bench)))
    kinds = {op.signature: op for op in found if op.kind == kernel.op}
    kinds |= {sample.op.signature: sample.op for sample in examples(definition, bench)}
    if not kinds:
        raise NotApplicable(f"no tiny run for {bench.target} has the op {kernel.op}")
    reasons = {signature: refusal(kernel, definition, op, target) for signature, op in kinds.items()}
    served = [op for signature, op in kinds.items() if not reasons[signature]]
    if not served:
        raise NotApplicable(f"it serves no {kernel.op} of tiny runs for {bench.target}: {next(iter(reasons.values()))}")
    return served


def _planned(bench: Bench) -> Iterator[Op]:
    """Yield the ops of the subject's runs in several dtypes. Runs that another definition refuses are left out."""
    narrow = {"param_grad_dtype": "bf16", "optimizer_state_dtype": "bf16", "master_dtype": "fp32"}
    for own in bench.own_runs():
        dtype = {} if "model_dtype" in own else {"model_dtype": "bf16"}
        report = {"numerics_report_steps": 1} if "recipe" in own else {}
        for keys in ({}, {**dtype, **narrow}, {**dtype, "recompute": "true"}, report):
            try:
                plan = bench.plan(**{"kernels": "allow_reference", **own, **keys})
            except SurogateError as error:
                if str(error).startswith("kernel "):
                    raise
                continue
            for program in plan.assembly.all_programs.values():
                yield from program.ops


@proves(
    "kernel",
    remedy="supports, workspace and notice answer from the op and the target alone, and import no compiled module.",
)
def it_answers_what_a_plan_asks(kernel: KernelDef, bench: Bench) -> None:
    definition = bench.registry.ops.get(kernel.op)
    assert definition is not None, f"no installed plugin defines its op {kernel.op}"
    unknown = sorted(set(kernel.attrs) - set(definition.attrs))
    assert not unknown, f"KernelDef.attrs names {', '.join(unknown)}, which {kernel.op} does not have"
    unknown = sorted(set(kernel.takes) - set(definition.optional))
    assert not unknown, f"KernelDef.takes names {', '.join(unknown)}, no optional input of {kernel.op}"
    for name in ("a100", "h100", bench.target):
        target = Target(device(name))
        for op in _ops(kernel, bench) if (target.device.sm or 0) >= kernel.sm else ():  # core asks of no other
            found = kernel.supports(op, target)
            assert isinstance(found, Support), f"supports returns {found!r:.60}"
            assert found.ok or found.reason, f"supports refuses {name} without a reason"
            if found.ok:
                size, again = (kernel.workspace(op, target) for _ in range(2))
                assert isinstance(size, int) and size >= 0 and size == again, f"workspace is {size!r}, then {again!r}"
                assert isinstance(kernel.notice(op, target), str), "notice returns no text"


@proves(
    "kernel",
    remedy="bind returns context.call(launch, ...), or a tuple of Launch, whose functions take the stream last.",
)
def its_launches_get_every_output_and_the_stream(kernel: KernelDef, bench: Bench) -> None:
    if kernel.module and importlib.util.find_spec(kernel.module) is None:
        raise NotApplicable(f"{kernel.module} is not compiled here")
    for op in _ops(kernel, bench):
        context = Recorder(Target(device(bench.target)))
        context.workspace = 0xCD000000 if kernel.workspace(op, context.target) else 0
        try:
            bound = check_reads_attrs(kernel, op, context)
        except (RuntimeError, OSError, ConfigError) as error:
            raise NotApplicable(f"it binds on a GPU only: {str(error).splitlines()[0]}") from None
        launches = as_launches(bound)
        assert launches, "bind returns no launch"
        given = [argument for launch in launches for argument in launch.call[1]]
        for launch in launches:
            function, arguments = launch.call
            assert callable(function), f"a launch is {function!r:.60}, expected a function"
            assert arguments and arguments[-1] == context.stream, "the last argument of a launch is not the stream"
        reached = {*(a for a in given if isinstance(a, int)), *context.words}
        optional = bench.registry.ops[op.kind].optional
        used = {f"output {i}": v for i, v in enumerate(op.written)}
        used |= {f"input {name}": op.ins[i] for name, i in optional.items() if i < len(op.ins)}
        lost = [
            name
            for name, v in used.items()
            if context.addresses.get(v) not in reached and not _inside(v, reached, context)
        ]
        assert not lost, f"{', '.join(lost)} of {op.kind} reaches no launch"


@proves("kernel", remedy="OpDef.reference defines the op. `run_kernel` of surogate_core.testing.binding runs one case.")
def its_results_are_those_of_the_reference(kernel: KernelDef, bench: Bench) -> None:
    """Also: eager and captured in a graph they are the same, and nothing outside of the buffers is written."""
    if not torch.cuda.is_available():
        raise NotApplicable("no GPU is visible")
    bench.sample_ops(all_dtypes=True)
    target, definition = Target(training_device()), bench.registry.ops[kernel.op]
    given = examples(definition, bench) + bench.samples.get(kernel.op, [])
    found = [s for s in given if not refusal(kernel, definition, s.op, target)]
    if not found:
        raise NotApplicable(f"it serves no {kernel.op} of tiny runs on {target.device.title}")
    for sample in found[:MOST]:
        check_results(kernel, definition, sample)


def check_results(kernel: KernelDef, definition: OpDef, sample: Sample) -> None:
    """Run a kernel and compare its outputs with those of the reference."""
    op = sample.op
    contents = dict(zip(op.ins, sample.ins, strict=True))
    contents |= {op.outs[i]: _zeros(op.outs[i]) for i in op.accumulate}
    theirs = load(definition.reference)(*sample.ins, **op.attrs)
    ours = binding.run_kernel([kernel], op, contents)
    for value, one, other in zip(op.written, ours, theirs if isinstance(theirs, tuple) else (theirs,), strict=True):
        if value.dtype in ("fp32", "bf16", "fp64"):
            error = relative_error(one, other)
            allowed = 1e-2 if "bf16" in {v.dtype for v in (*op.ins, *op.outs)} else 1e-4
            assert error <= allowed, (
                f"{value.label or value.name} is off by {error:.1e} of its norm (allowed {allowed:.0e})"
            )
        else:
            different = float((one.view(torch.uint8) != other.view(torch.uint8)).double().mean())
            assert different <= 1e-3, f"{different:.1%} of the bytes of {value.label or value.name} differ"


def _zeros(value: Value) -> Tensor:
    return torch.zeros(value.stored_shape, dtype=TORCH_DTYPES[value.dtype])


def _inside(value: Value, reached: set[int], context: Recorder) -> bool:
    """Return whether a launch gets an address inside of a value."""
    at = context.addresses.get(value)
    return at is not None and any(at <= word < at + value.nbytes for word in reached)
