"""The share of bandwidth that `surogate plugins test` prints where there is a GPU: here with a card that is made up."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from made_up_plugins import Install, installing
from typer.testing import CliRunner, Result

from surogate import run
from surogate.cli.app import app
from surogate_conformance import bandwidth, bench_of
from surogate_conformance.bandwidth import SIZES, Share, shares, unmeasured
from surogate_conformance.bench import Sample
from surogate_core.api import DeviceInfo, KernelDef
from surogate_core.machine.devices import device
from surogate_core.memory.cost import OpCosts
from surogate_profile.step_profile import OpTime, StepProfile

SLOWER = 4
"""Times that an op takes on the card, of what its bytes take at the copy rate."""

KERNELS = """
from surogate_core.api import KernelDef, OpDef, Support, provides

SUROGATE_API = {"kernels": 1}

def kernel(op, count, ok=True):
    return KernelDef(op=op, dtypes=("bf16",) * count, attrs=("eps",), bind=lambda op, context: (print, ()),
                     supports=lambda o, t: Support(ok and t.device.sm is not None, "needs SM200"))

surogate_kernels = provides([kernel("swiglu", 2, ok=False), kernel("swiglu", 2), kernel("silu", 2)])
"""


class MadeUpCard:
    """A card whose kernels move bytes at a share of 1 / SLOWER of its copy rate."""

    def __init__(self) -> None:
        self.device: DeviceInfo = device("h200")
        self.copy_rate = self.device.bandwidth
        self.runs: list[Path] = []

    def seconds(self, kernel: KernelDef, sample: Sample) -> float:
        return SLOWER * sum(x.nbytes for x in sample.ins) * 2 / self.copy_rate

    def profile(self, config: Path) -> StepProfile:
        self.runs.append(config)
        plan = run.plan(run.load(config), self.device, 1)
        costs = OpCosts(plan.inputs.ops, self.device, plan.kernels.kernel)
        ops = [
            OpTime(name, index, op, 2.0, SLOWER * costs(op).bytes / self.copy_rate, costs(op), 1.0)
            for name, program in plan.assembly.programs.items()
            for index, op in enumerate(program.ops)
        ]
        return StepProfile(
            model="",
            recipe="",
            device=self.device,
            weights="",
            batches="",
            method="",
            steps=(1.0,),
            tokens=1.0,
            planned_seconds=1.0,
            event_seconds=0.0,
            ops=tuple(ops),
        )


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    yield from installing(tmp_path, monkeypatch)


def measured(name: str) -> tuple[list[Share], list[str], MadeUpCard]:
    card = MadeUpCard()
    with bench_of(name, "h200") as bench:
        found = shares(bench, card)
        return found, unmeasured(bench, found), card


def outcome(*args: str) -> Result:
    return CliRunner().invoke(app, ["plugins", "test", *args])


def test_the_share_is_bytes_over_time_over_the_copy_rate_of_the_largest_op() -> None:
    found, missing, card = measured("surogate-optim-adamw")
    assert [share.kernel for share in found] == ["adamw"] and not missing
    assert found[0].share == pytest.approx(1 / SLOWER) and not found[0].arithmetic
    weights = 2 * SIZES["vocab_size"] * SIZES["hidden_size"]
    assert found[0].bytes > 16 * weights, "weights of a usual size are updated, not of a tiny one"
    assert found[0].seconds == pytest.approx(SLOWER * found[0].bytes / card.copy_rate)
    assert len(card.runs) == 2, "the default run and one that selects the optimizer"


def test_products_are_marked_as_bound_by_arithmetic() -> None:
    found, _, _ = measured("surogate-recipe-bf16")
    bound = {share.kernel.partition(" ")[0] for share in found if share.arithmetic}
    assert {"linear", "attention"} <= bound and bound.isdisjoint({"rmsnorm", "swiglu", "global_norm"})


def test_a_kernel_of_another_s_op_is_selected_where_it_serves_and_others_are_named(install: Install) -> None:
    install("acme-kernels", "1.0", "acme", KERNELS)
    found, missing, card = measured("acme-kernels")
    assert [share.kernel for share in found] == ["swiglu (2)"]
    assert missing == ["swiglu", "silu"]
    assert len(card.runs) == 1


def test_a_kernel_that_no_run_selects_is_timed_on_the_examples_of_its_op(install: Install) -> None:
    infer = 'lambda ins, attrs: [OutSpec("y", ins[0].shape, ins[0].dtype)]'
    op = f'OpDef(kind="silu", infer={infer}, reference="torch:sigmoid")'
    example = 'SUROGATE_EXAMPLES = {"op silu": [{"ins": ["bf16[8,4]"]}, {"ins": ["bf16[1024,512]"]}]}\n'
    head = KERNELS.replace("OpDef, Support", "OpDef, OutSpec, Support").replace('{"kernels"', '{"ops": 1, "kernels"')
    install("acme-kernels", "1.0", "acme", f"{head}{example}surogate_ops = provides([{op}])")
    found, missing, _ = measured("acme-kernels")
    assert [share.kernel for share in found] == ["swiglu (2)", "silu"] and missing == ["swiglu"]
    assert found[1].bytes == 2 * 1024 * 512 * 2 and found[1].share == pytest.approx(1 / SLOWER)


def test_a_plugin_without_kernels_runs_nothing_on_the_card() -> None:
    found, missing, card = measured("env")
    assert (found, missing, card.runs) == ([], [], [])


def test_the_shares_are_printed_and_fail_nothing(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("acme-kernels", "1.0", "acme", KERNELS)
    monkeypatch.setattr(bandwidth, "visible_card", MadeUpCard)
    lines = outcome("acme-kernels").stdout.splitlines()
    at = lines.index("bandwidth on NVIDIA H200, whose copies move 4.21 TB/s")
    assert lines[at + 1] == "  swiglu (2)  302.0 MB  287.2 us  25%"
    assert lines[at + 2] == "  not measured, because no run selects them and no example is served: swiglu, silu"
    document = json.loads(outcome("acme-kernels", "--json").stdout)
    assert document["copy_rate"] == device("h200").bandwidth
    (share,) = document["bandwidth"]
    assert share["kernel"] == "swiglu (2)" and share["share"] == pytest.approx(0.25)
    assert share["dtypes"] == ["bf16", "bf16"]


def test_without_a_gpu_nothing_is_measured(install: Install, monkeypatch: pytest.MonkeyPatch) -> None:
    install("acme-kernels", "1.0", "acme", KERNELS)
    monkeypatch.setattr(bandwidth, "visible_card", lambda: None)
    done = outcome("acme-kernels", "--json")
    assert (document := json.loads(done.stdout))["bandwidth"] == [] and document["copy_rate"] is None
    assert "bandwidth" not in outcome("acme-kernels").stdout
