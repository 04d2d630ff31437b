"""The device that `surogate plan` plans for by default, with a fake driver for each test."""

from __future__ import annotations

import ctypes
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from surogate import run
from surogate.cli.app import app
from surogate_core.api import compiled
from surogate_core.errors import ConfigError
from surogate_core.machine import local_device as module
from surogate_core.machine.devices import DEVICES, cpu, gpu
from surogate_core.machine.local_device import NoGpuError, local_device, torch_has_cuda, visible_gpus

ROOT = Path(__file__).parents[1]
RUN = [str(ROOT / "examples/quickstart.yaml"), "--set", f"model={ROOT / 'examples/tiny-qwen3'}"]
TRAIN = ["train", *RUN, "--set", "output_dir=not-written", "--set", "recipe=bf16"]
PLAN = ["plan", *RUN]


class Driver:
    """libcuda with equal GPUs; `fails` maps a function to the code that it returns."""

    def __init__(
        self, title: str = "NVIDIA H200", sm: int = 90, total: int = 150_000_000_000, count: int = 1, **fails: int
    ) -> None:
        self.title, self.sm, self.total, self.count, self.fails = title, sm, total, count, fails

    def __getattr__(self, function: str) -> Any:
        def call(*arguments: Any) -> int:
            if function in self.fails:
                return self.fails[function]
            getattr(self, f"_{function}")(*arguments)
            return 0

        return call

    def _cuInit(self, flags: int) -> None:
        assert flags == 0

    def _cuDeviceGetCount(self, count: Any) -> None:
        count._obj.value = self.count

    def _cuDeviceGet(self, device: Any, number: int) -> None:
        assert number == 0
        device._obj.value = 5

    def _cuDeviceGetName(self, name: Any, size: int, device: ctypes.c_int) -> None:
        assert device.value == 5 and len(self.title) < size
        name.value = self.title.encode()

    def _cuDeviceTotalMem_v2(self, total: Any, device: ctypes.c_int) -> None:
        total._obj.value = self.total

    def _cuDeviceGetAttribute(self, value: Any, number: int, device: ctypes.c_int) -> None:
        value._obj.value = {75: self.sm // 10, 76: self.sm % 10}[number]


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Install a `Driver` with the given arguments, a torch with CUDA, and no CUDA_VISIBLE_DEVICES."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(module, "torch_has_cuda", lambda: True)

    def install(*args: Any, **options: Any) -> None:
        loaded = Driver(*args, **options)
        monkeypatch.setattr(module, "ctypes", SimpleNamespace(**(vars(ctypes) | {"CDLL": lambda name: loaded})))

    return install


def test_a_known_gpu_has_its_actual_memory(driver: Any) -> None:
    driver()
    here = local_device()
    found, why = here.device, here.chosen
    assert (found.name, found.title, found.sm, found.memory_bytes) == ("h200", "NVIDIA H200", 90, 150_000_000_000)
    assert (found.flops, why) == (DEVICES["h200"].flops, "this machine's GPU")


def test_the_reason_names_cuda_visible_devices(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    assert local_device().chosen == "first of CUDA_VISIBLE_DEVICES=3,1"


def test_an_unknown_gpu_has_the_rates_of_its_generation(driver: Any) -> None:
    driver("NVIDIA Z9", 103, 1 << 36)
    found, _ = visible_gpus()
    assert (found.name, found.title, found.sm, found.memory_bytes) == ("gpu", "NVIDIA Z9", 103, 1 << 36)
    assert found.source == "rates of NVIDIA B300, the nearest known"


@pytest.mark.parametrize(
    ("title", "sm", "name"),
    [
        ("NVIDIA A100-SXM4-40GB", 80, "a100-40"),
        ("NVIDIA A100-SXM4-80GB", 80, "a100"),
        ("NVIDIA A100 80GB PCIe", 80, "a100"),
        ("NVIDIA A10", 86, "a10"),
        ("NVIDIA GeForce RTX 3090", 86, "rtx3090"),
        ("NVIDIA L40S", 89, "l40s"),
        ("NVIDIA H100 80GB HBM3", 90, "h100"),
        ("NVIDIA H100 PCIe", 90, "h100-pcie"),
        ("NVIDIA H100 NVL", 90, "h100-nvl"),
        ("NVIDIA B300 SXM6 AC", 103, "b300"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 120, "rtxpro6000"),
        ("NVIDIA GB10", 121, "spark"),
    ],
)
def test_the_names_that_drivers_give_are_in_the_device_table(title: str, sm: int, name: str) -> None:
    found = gpu(title, sm, 1 << 36)
    assert (found.name, found.title, found.flops) == (name, title, DEVICES[name].flops)


def test_an_unknown_gpu_gets_the_slowest_of_its_generation_by_both_rates() -> None:
    assert gpu("NVIDIA H7", 90, 1 << 36).source == "rates of NVIDIA H20, the nearest known"


@pytest.mark.parametrize(
    ("fails", "visible", "why"),
    [
        ({"cuInit": 100}, None, "no GPU found"),
        ({"cuInit": 100}, "", "no GPU in CUDA_VISIBLE_DEVICES="),
        ({"cuInit": 100}, "9", "no GPU in CUDA_VISIBLE_DEVICES=9"),
        ({"cuInit": 34}, None, "no NVIDIA driver found, only a toolkit's stub of it"),
        ({"cuInit": 803}, None, "no GPU: the CUDA driver's cuInit fails with 803"),
        ({"cuDeviceTotalMem_v2": 201}, None, "no GPU: the CUDA driver's cuDeviceTotalMem_v2 fails with 201"),
    ],
)
def test_without_a_gpu_it_is_the_cpu_and_the_reason(
    driver: Any, monkeypatch: pytest.MonkeyPatch, fails: dict[str, int], visible: str | None, why: str
) -> None:
    driver(**fails)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    here = local_device()
    assert (here.device.name, here.count, here.chosen) == ("cpu", 1, why)


def test_without_a_driver_it_is_the_cpu(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "DRIVER", "libno_such_driver.so.1")
    with pytest.raises(NoGpuError, match="no NVIDIA driver found"):
        visible_gpus()
    assert local_device().device.name == "cpu"


def test_a_torch_without_cuda_trains_on_the_cpu(driver: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    spec = SimpleNamespace(origin=str(tmp_path / "torch/__init__.py"))
    monkeypatch.setattr(module, "find_spec", lambda name: spec)
    monkeypatch.setattr(module, "torch_has_cuda", torch_has_cuda)
    driver()
    assert local_device().chosen == "torch is built without CUDA and cannot use NVIDIA H200"
    (tmp_path / "torch/lib").mkdir(parents=True)
    (tmp_path / "torch/lib/libtorch_cuda.so").touch()
    assert local_device().device.name == "h200"


def test_torch_has_cuda_agrees_with_torch() -> None:
    import torch

    assert torch_has_cuda() == torch.backends.cuda.is_built()


def test_plan_shows_the_device_and_the_reason(driver: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    driver(total=70 << 30)
    ours, asked = CliRunner().invoke(app, PLAN), CliRunner().invoke(app, [*PLAN, "--device", "h100"])
    assert "\nNVIDIA H200, 70.00 GiB (this machine's GPU)\n" in ours.output
    assert "\nNVIDIA H100 80GB HBM3, 79.10 GiB (--device h100)\n" in asked.output
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    driver(cuInit=100)
    none = CliRunner().invoke(app, PLAN)
    assert " GiB (no GPU in CUDA_VISIBLE_DEVICES=)\n" in none.output
    as_json = json.loads(CliRunner().invoke(app, [*PLAN, "--json"]).output)
    assert (as_json["device"]["name"], as_json["device"]["chosen"]) == ("cpu", "no GPU in CUDA_VISIBLE_DEVICES=")


def test_a_gpu_that_torch_cannot_use_is_the_first_line_of_plan_and_doctor_and_the_end_of_a_run(
    driver: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver()
    monkeypatch.setattr(module, "torch_has_cuda", lambda: False)
    says = "runs cannot use the GPU: torch is built without CUDA and cannot use NVIDIA H200. "
    for verb in (PLAN, ["doctor"]):
        assert CliRunner().invoke(app, verb).output.startswith(f"problem: {says}"), verb
    refused = CliRunner().invoke(app, TRAIN)
    assert refused.exit_code == 2 and refused.output.startswith(f"error: {says}")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert not local_device().idle, "the user hides it"


def test_a_failing_driver_is_an_error_and_not_a_run_on_the_cpu(driver: Any) -> None:
    driver(cuInit=803)
    refused = CliRunner().invoke(app, TRAIN)
    assert refused.exit_code == 2
    assert "error: runs cannot use the GPU: no GPU: the CUDA driver's cuInit fails with 803." in refused.output


@pytest.mark.parametrize(("visible", "quiet"), [("9", False), ("", True), ("-1", True)])
def test_a_named_gpu_that_is_absent_is_an_error_and_not_a_run_on_the_cpu(
    driver: Any, monkeypatch: pytest.MonkeyPatch, visible: str, quiet: bool
) -> None:
    driver(cuInit=100)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert (local_device().idle == "") is quiet


def test_a_gpu_that_the_driver_sees_and_torch_does_not_ends_a_run(driver: Any) -> None:
    driver()
    refused = CliRunner().invoke(app, TRAIN)
    assert refused.exit_code == 2
    assert "error: torch " in refused.output and "cannot use NVIDIA H200" in refused.output


@pytest.fixture
def absent_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernel modules are missing, as if the packages were installed without compiled code."""
    monkeypatch.setattr(compiled, "find_spec", lambda name: None)


def test_a_gpu_without_kernels_is_the_first_line_of_plan_and_doctor(driver: Any, absent_kernels: None) -> None:
    driver()
    for verb in (PLAN, ["doctor"]):
        first = CliRunner().invoke(app, verb).output.splitlines()[0]
        assert first.startswith("problem: kernels for NVIDIA H200 (SM90) are missing: "), verb
        assert "surogate_recipes_bf16._C is not compiled" in first and "SUROGATE_CUDA=on" in first
    assert "problem:" not in CliRunner().invoke(app, [*PLAN, "--device", "h200"]).output
    as_json = json.loads(CliRunner().invoke(app, [*PLAN, "--json"]).output)
    assert as_json["device"]["problem"].startswith("kernels for NVIDIA H200")


def test_a_run_on_a_gpu_without_kernels_ends_before_it_reads_data_unless_references_are_allowed(
    driver: Any, absent_kernels: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    driver()
    begun: list[str] = []
    monkeypatch.setattr("surogate_core.runtime.device.training_device", lambda: local_device().device)
    monkeypatch.setattr("surogate.training.trainer.train_planned", lambda *given: begun.append("train") or None)
    monkeypatch.setattr("surogate_core.runtime.device.refuse_unequal", lambda devices: None)
    notices: list[str] = []
    with pytest.raises(ConfigError, match=r"kernels for NVIDIA H200 .SM90. are missing: .*CUDA_VISIBLE_DEVICES="):
        run.train(run.load(TRAIN[1], TRAIN[3::2]), notices.append)
    assert (begun, notices) == ([], [])
    run.train(run.load(TRAIN[1], [*TRAIN[3::2], "kernels=allow_reference"]), notices.append)
    assert begun == ["train"] and notices[0].startswith("kernels: allow_reference: torch references run instead of")


@pytest.mark.parametrize(("gpus", "planned"), [(0, "4 x NVIDIA H200"), (2, "2 x NVIDIA H200"), (1, "NVIDIA H200")])
def test_gpus_0_plans_for_all_gpus_of_this_machine(driver: Any, gpus: int, planned: str) -> None:
    driver(count=4, total=70 << 30)
    each = ", on each" if gpus != 1 else ""
    text = " ".join(CliRunner().invoke(app, [*PLAN, "--set", f"gpus={gpus}"]).output.split())
    assert f" {planned}, 70.00 GiB{each} (first of this machine's 4 GPUs) " in text


@pytest.mark.parametrize(("cores", "rate"), [(2, 24e9), (64, 307e9)])
def test_many_cores_share_the_memory_of_a_socket(cores: int, rate: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda process: set(range(cores)))
    assert (cpu().bandwidth, cpu().flops["fp32"]) == (rate, cores * 80e9)
