"""Faults that are planted in a sound plugin: each fails the check of its kind, with a line that says what is wrong."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

import oss_mixture
import pytest
import stacked_family
import torch
from conformance.planted_faults import DERIVATIVE, FALLS, FAULTS, MEASURING, ROWS, Fault
from torch import Tensor

from surogate_conformance import bench_folder
from surogate_conformance.bench import Bench
from surogate_conformance.cases import cases
from surogate_conformance.check import Result
from surogate_conformance.kinds import kernels
from surogate_conformance.subject import found
from surogate_core.api import Op, Value
from surogate_core.machine.devices import device

HERE = Path(__file__).parent
SOUND = (HERE / "sound_plugin.py").read_text()
EXAMPLE = HERE.parents[1] / "plugins/example_third_party/src"


@pytest.fixture(scope="module", autouse=True)
def importable() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(EXAMPLE)
        patch.syspath_prepend(HERE)
        patch.setenv("SUROGATE_PLUGINS", "-models_gptoss")  # `stacked_family` is the same architecture
        yield


def results(folder: Path, source: str, sentence: str = "") -> Iterator[Result]:
    """Yield the results of the checks with this name, or of all, for the sound plugin with `source` appended."""
    file = folder / "acme.py"
    file.write_text(SOUND + "\n\n" + source)
    with found(str(file)) as subject, bench_folder() as where:
        for case in cases(subject, Bench(subject, where)):
            if sentence in ("", case.check.sentence):
                yield case.run()


@pytest.mark.slow
def test_the_sound_plugin_passes_every_check(tmp_path: Path) -> None:
    all_of_it = list(results(tmp_path, ""))
    assert [str(result) for result in all_of_it if result.state == "failed"] == []
    assert sum(result.state == "passed" for result in all_of_it) > 60


@pytest.mark.slow
def test_a_family_of_stacks_passes_every_check() -> None:
    with found(stacked_family.__file__) as subject, bench_folder() as where:
        all_of_it = [case.run() for case in cases(subject, Bench(subject, where))]
    assert [str(result) for result in all_of_it if result.state == "failed"] == []
    of_stacks = [r for r in all_of_it if re.search("leading|expert", r.sentence)]
    assert [r.state for r in of_stacks] == ["passed"] * 3


def test_biases_of_experts_are_no_stacks_of_matrices() -> None:
    """They are [experts, rows], and the products of experts read them."""
    with found(oss_mixture.__file__) as subject, bench_folder() as where:
        every = cases(subject, Bench(subject, where))
        (result,) = [case.run() for case in every if case.check.sentence == "each expert is a matrix of its own"]
    assert result.state == "passed", str(result)


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault.name, marks=() if index % 3 == 0 else pytest.mark.slow)
        for index, fault in enumerate(FAULTS)
    ],
)
def test_a_fault_fails_its_check_with_a_line_that_is_right(fault: Fault, tmp_path: Path) -> None:
    of_kind = [r for r in results(tmp_path, fault.source, fault.sentence) if r.what.startswith(fault.what)]
    failed = [result for result in of_kind if result.state == "failed"]
    assert failed, [str(result) for result in of_kind]
    assert re.search(fault.reason, failed[0].reason), failed[0].reason
    assert "Traceback" not in str(failed[0])


@pytest.mark.parametrize(
    ("source", "sentence", "remedy"),
    [
        ("change('FORMAT', encode=lambda row, t, o: Encoded([5, 6], [True]))", ROWS, "Return Encoded with as many"),
        ("change('FORMAT', encode=lambda row, t, o: {}['gone'])", ROWS, ""),
        ("def asserts(row, t, o):\n    assert t is None\nchange('FORMAT', encode=asserts)", ROWS, ""),
        ("change('MODEL', dims=lambda c: dims(c['gone']))", FALLS, ""),
        (
            "def picky(c):\n    raise ConfigError('acme_size: is missing')\nchange('MODEL', dims=picky)",
            FALLS,
            "Give a con",
        ),
    ],
)
def test_what_to_do_is_said_where_the_check_found_the_fault(
    source: str, sentence: str, remedy: str, tmp_path: Path
) -> None:
    """Other errors say it themselves, and the remedy of the check would mislead."""
    failed = next(result for result in results(tmp_path, source, sentence) if result.state == "failed")
    assert failed.remedy.startswith(remedy) and bool(failed.remedy) == bool(remedy), str(failed)


@pytest.mark.parametrize(
    ("op", "reason"),
    [
        ("op acme_sgd", "no forward pass has it, so nothing differentiates it"),
        ("op acme_total", "it has no rule; autograd differentiates its reference"),
    ],
)
def test_it_is_said_why_a_backward_rule_is_not_compared(op: str, reason: str, tmp_path: Path) -> None:
    source = MEASURING + "measuring(lambda b, batch: batch.loss_scale)"
    (found,) = (r for r in results(tmp_path, source, DERIVATIVE) if r.what == op)
    assert (found.state, found.reason) == ("not applicable", reason)


def test_nothing_is_said_of_plugins_that_do_not_load(tmp_path: Path) -> None:
    of_package = {r.sentence: r.state for r in results(tmp_path, "import no_such_module")}
    assert of_package["its plugins load"] == "failed" and list(of_package.values()).count("failed") == 1
    assert of_package["nothing that it provides is left over"] == "not applicable"
    assert of_package["its module imports nothing that is slow"] == "not applicable"


def test_there_are_faults_of_every_kind() -> None:
    kinds = {
        "package",
        "op",
        "kernel",
        "model",
        "recipe",
        "optimizer",
        "adapter",
        "weight",
        "checkpoint",
        "offload",
        "format",
        "export",
    }
    assert {fault.what.split()[0] for fault in FAULTS} == {*kinds, "logger", "launcher", "loss"}


SOUND_TOO = {
    "a batch without labels adds nothing": (
        "TABLE = OpDef(kind='acme_table', reference='sound_references:table',\n"
        "    infer=lambda ins, attrs: [OutSpec('table', (2,), 'fp32')])\n"
        "surogate_ops = hook('OP', 'UPDATE', 'INT8', 'FROM_INT8', 'TABLE')\n"
        "def tabled(c, build=LOSS.build):\n"
        "    table = c.builder.apply('acme_table', c.head.x, c.batch.targets, c.batch.loss_scale)\n"
        "    metric = Metric('spread', table, of=lambda v: v[1] - v[0] ** 2)\n"
        "    return dataclasses.replace(build(c), metrics=[metric])\n"
        "change('LOSS', build=tabled)"
    ),
    "it answers what a plan asks": (
        "def newest(op, target):\n    assert target.device.sm >= 90\n    return Support(True)\n"
        "change('KERNEL', sm=90, supports=newest)"
    ),
}


@pytest.mark.parametrize("sentence", SOUND_TOO)
def test_what_is_sound_passes(sentence: str, tmp_path: Path) -> None:
    """A metric of a loss may be a table. `supports` is asked of GPUs from `KernelDef.sm` on."""
    found = [(result.state, str(result)) for result in results(tmp_path, SOUND_TOO[sentence], sentence)]
    assert [state for state, _ in found] == ["passed"], found


@pytest.mark.parametrize(("factor", "state"), [(1.0, "passed"), (1.1, "failed")])
def test_a_kernel_is_compared_with_its_reference_on_a_gpu(
    factor: float, state: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without a GPU: the reference takes the place of the kernel, once with a wrong factor."""

    def run(kernels: object, op: Op, contents: Mapping[Value, Tensor]) -> list[Tensor]:
        return [factor * contents[op.ins[0]].float().relu().square().to(contents[op.ins[0]].dtype)]

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(kernels, "training_device", lambda: device("h200"))
    monkeypatch.setattr(kernels.binding, "run_kernel", run)
    (result,) = results(tmp_path, "", "its results are those of the reference")
    assert result.state == state, str(result)
    assert ("off by 1.0e-01" in result.reason) == (state == "failed")
