"""Kernels are chosen once; a run on a GPU that lacks one is refused before data are read, with every reason."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
from models.harness import OPS, plan_inputs, tiny_config

from surogate import run
from surogate.cli import plan_text
from surogate.training import start as training
from surogate_core.api import DeviceInfo, KernelDef, Op, Support, Target, Value
from surogate_core.assembly.assemble import assemble
from surogate_core.assembly.resolve import KernelTable, resolve, unserved_ops
from surogate_core.errors import ConfigError
from surogate_core.machine.devices import device
from surogate_core.machine.local_device import LocalDevice
from surogate_core.plugins.registry import REFERENCE, Registry, Resolved, refusal
from surogate_core.program.op import Signature

H200 = Target(device("h200"))
TINY = Path(__file__).parents[2] / "examples/quickstart.yaml"


def kernel(op: str, scratch: int = 0) -> KernelDef:
    return KernelDef(
        op=op,
        dtypes=("*",),
        supports=lambda op, target: Support(True),
        bind=lambda op, context: (print, ()),
        workspace=lambda op, target: scratch,
        notice=lambda op, target: f"{op.kind} is new",
        module="acme._C",
    )


def test_a_kernel_is_not_asked_about_an_older_gpu_than_it_names_or_about_a_cpu() -> None:
    x = Value("x", (8,), "bf16", "act")
    asked: list[Target] = []

    def supports(op: Op, target: Target) -> Support:
        asked.append(target)
        return Support(True)

    op, definition = Op("cast", (x,), (), {"dtype": "bf16"}), OPS["cast"]
    for sm, name, refused in ((80, "a100", ""), (90, "a100", "SM90"), (80, "cpu", "SM80"), (90, "h200", "")):
        reason = refusal(replace(kernel("cast"), sm=sm, supports=supports), definition, op, Target(device(name)))
        assert reason == (f"needs a GPU of {refused} or newer, not {device(name).title}" if refused else "")
    assert [target.device.name for target in asked] == ["a100", "h200"]


def table(target: Target = H200) -> KernelTable:
    def kernel_for(op: Op) -> Resolved:
        if op.kind == "linear":
            return Resolved(kernel("linear", scratch=512), "acme")
        return Resolved(None, REFERENCE, ("acme: needs SM100", "acme: serves dtypes (fp32)"))

    return assemble(replace(plan_inputs(tiny_config()), kernel_for=kernel_for, target=target)).kernels


def test_the_choice_is_made_once_for_ops_of_equal_signature() -> None:
    asked: Counter[Signature] = Counter()

    def kernel_for(op: Op) -> Resolved:
        asked[op.signature] += 1
        return Resolved(None, REFERENCE)

    assembly = assemble(
        replace(plan_inputs(tiny_config(), seq_len=32, max_documents=64), kernel_for=kernel_for, target=H200)
    )
    assert assembly.variants
    assert asked == Counter({op.signature for program in assembly.all_programs.values() for op in program.ops})


def test_planner_and_report_read_the_table() -> None:
    kernels = table()
    linear = next(op for op, _ in kernels.by_signature.values() if op.kind == "linear")
    swiglu = next(op for op, _ in kernels.by_signature.values() if op.kind == "swiglu")
    assert kernels.workspace(linear) == 512 and kernels.workspace(swiglu) == OPS["swiglu"].workspace(swiglu)
    assert kernels.providers["linear"] == "acme" and kernels.providers["swiglu"] == REFERENCE
    assert kernels.notices == ("linear is new",) and kernels.modules == {"acme._C"}


def test_a_plan_names_the_packages_that_could_serve_an_op_too() -> None:
    x, w, y = (Value(name, (8, 8), "bf16", "act") for name in "xwy")
    op = Op("linear", (x, w), (y,))
    kernels = resolve([op], lambda op: Resolved(kernel(op.kind), "acme", (), ("zeta",)), H200, OPS)
    assert kernels.others == {"linear": ("zeta",)}
    assert list(plan_text._kernels(kernels, False)) == [
        "kernels of acme: linear",
        "linear could also run by zeta: kernels: {linear: zeta}",
    ]


def test_unserved_ops_are_named_with_every_reason_on_a_gpu_alone() -> None:
    text = unserved_ops(table())
    assert "NVIDIA H200: no compiled kernel serves these ops" in text
    assert "(dtypes by model_dtype: bf16)" in text and "kernels: allow_reference" in text
    assert "swiglu" in text and "acme: needs SM100; acme: serves dtypes (fp32)" in text and "linear," not in text
    assert unserved_ops(table(Target(device("cpu")))) == ""


def test_a_run_that_lacks_a_kernel_is_refused_before_data_are_read(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_swiglu(self: Registry, op: Op, target: Target, recipe: str, chosen: object) -> Resolved:
        served = Resolved(kernel(op.kind), "acme")
        return Resolved(None, REFERENCE, ("acme: needs SM100",)) if op.kind == "swiglu" else served

    here: DeviceInfo = H200.device
    begun: list[str] = []
    monkeypatch.setattr(Registry, "kernel_for", no_swiglu)
    monkeypatch.setattr("surogate_core.assembly.resolve.idle_modules", lambda kernels: {})
    monkeypatch.setattr(training, "usable_device", lambda: LocalDevice(here, 1, "the first GPU"))
    monkeypatch.setattr(training, "device_of_torch", lambda local: here)
    monkeypatch.setattr(training, "open_contexts", lambda count: None)
    monkeypatch.setattr("surogate_core.runtime.device.refuse_unequal", lambda devices: None)
    monkeypatch.setattr("surogate.training.trainer.train_planned", lambda *given: begun.append("train"))
    monkeypatch.chdir(TINY.parents[1])
    with pytest.raises(ConfigError, match=r"no compiled kernel serves these ops.*\n  swiglu: acme: needs SM100"):
        run.train(run.load(TINY, ["overwrite_output_dir=true"]))
    assert not begun
    run.train(run.load(TINY, ["overwrite_output_dir=true", "kernels=allow_reference"]), lambda line: None)
    assert begun == ["train"]
