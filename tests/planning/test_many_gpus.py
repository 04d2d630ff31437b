"""Plans for several GPUs, machines and ranks on a device: links, memory, and the speed over that of single GPUs."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surogate import run
from surogate.cli.plan_text import plan_text
from surogate_core.api import DeviceInfo, Link
from surogate_core.errors import ConfigError
from surogate_core.machine.devices import COLLECTIVE_BYTES, DEVICES, GATHER_BYTES, cpu, device
from surogate_core.machine.links import route
from surogate_core.memory.cost import OpCosts, program_cost
from surogate_core.planning.plan import Plan

MODEL = Path(__file__).parents[2] / "benchmarks/models/qwen3-0.6b"
H100 = device("h100")
HOP, NETWORK_HOP = 3.4e-6, 14e-6

Plans = Callable[..., Plan]


@pytest.fixture
def plan(tmp_path: Path) -> Plans:
    """Return a function that plans a run: (device, gpus, nodes, keys, key=value ...)."""

    def planned(
        on: str = "h100", gpus: int | None = None, nodes: int = 1, keys: Mapping[str, Any] | None = None, **more: Any
    ) -> Plan:
        model, config = tmp_path / "config.json", tmp_path / "run.yaml"
        model.write_text(json.dumps(json.loads((MODEL / "config.json").read_text()) | {"num_hidden_layers": 10}))
        small = {"sequence_len": 512, "per_device_train_batch_size": 1, "gradient_accumulation_steps": 2}
        config.write_text(json.dumps({"model": str(tmp_path), "from_scratch": True} | small | dict(keys or {}) | more))
        return run.plan(run.load(config), on, gpus, nodes)

    return planned


# --------------------------------------------------------------------------------------------------------------- links


def test_a_machine_sends_at_the_rate_of_all_its_ports_but_no_faster_than_its_own_link() -> None:
    fast, slow = Link("fast", 100.0), Link("slow", 20.0)
    one_rate = replace(H100, link=fast, network=slow)
    assert route(one_rate, 8).link == fast
    assert [route(one_rate, n, 2).link for n in (2, 8, 10, 16)] == [slow, Link("slow", 80.0), fast, fast]
    assert route(replace(H100, link=slow, network=fast), 16, 2).link == slow
    nvlink = Link("NVLink", 90.0, taken=0.3, gathered=0.1)
    assert route(replace(H100, link=nvlink), 8).link == nvlink
    assert route(replace(H100, link=nvlink), 16, 2).link.gathered == 0.3, "kernels gather between machines"
    assert route(replace(H100, link=slow, network=fast), 2, 2).link == fast, "one GPU a machine has no other link"
    assert route(one_rate, 16, 2, ranks_per_device=4).link == Link("slow", 40.0), "two GPUs on each"


def test_ranks_of_one_device_meet_in_its_memory() -> None:
    assert route(H100, 4, ranks_per_device=4).link.bandwidth == H100.bandwidth / 2


@pytest.mark.parametrize(
    ("ranks", "nodes", "latency"),
    [
        (1, 1, 0),
        (2, 1, 2 * HOP),
        (8, 1, 14 * HOP),
        (2, 2, 2 * NETWORK_HOP),
        (16, 2, 14 * HOP + 2 * NETWORK_HOP),
        (64, 8, 14 * HOP + 6 * NETWORK_HOP),  # a tree: a ring passes 112 GPUs and 14 times the network
        (64, 64, 12 * NETWORK_HOP),
    ],
)
def test_the_latency_is_that_of_a_ring_or_of_a_tree_whichever_is_less(ranks: int, nodes: int, latency: float) -> None:
    assert route(H100, ranks, nodes).latency == pytest.approx(latency)
    assert route(H100, ranks, nodes).seconds(0) == 0
    assert route(H100, ranks, nodes).seconds(1 << 30) > latency


@pytest.mark.parametrize("d", [*DEVICES.values(), cpu()], ids=lambda d: d.name)
def test_every_link_says_whether_it_was_measured(d: DeviceInfo) -> None:
    assert 5e9 < d.link.bandwidth < 1e12 and 1e9 < d.network.bandwidth < 1e11 and d.network.name and d.link.name
    measured = [link for link in (d.link, d.network) if "not measured" not in link.source]
    assert measured == ([d.link] if d.name == "h100" else []) or d.sm is None


# ---------------------------------------------------------------------------------------------------------------- time


def update_seconds(plan: Plan) -> float:
    """Return the seconds of the update without collectives."""
    update = plan.assembly.only("update")
    alone = replace(update, ops=tuple(op for op in update.ops if op.lane != "comm"))
    return program_cost(alone, OpCosts(plan.inputs.ops, plan.report.device, plan.kernels.kernel)).seconds


@pytest.mark.parametrize("steps", [1, 3])
def test_the_scaling_is_the_speed_over_that_without_communication(plan: Plans, steps: int) -> None:
    single = plan(gradient_accumulation_steps=steps)
    one = single.report
    assert one.alone == one.step.seconds and one.scaling == 1
    for gpus, nodes in ((2, 1), (8, 1), (64, 8), (8, 8)):
        divided = plan(gpus=gpus, nodes=nodes, gradient_accumulation_steps=steps)
        many = divided.report
        assert 0.5 * one.step.seconds < many.alone < one.step.seconds, "ranks divide the update"
        assert many.alone - update_seconds(divided) == pytest.approx(
            one.step.seconds - update_seconds(single), rel=1e-9
        )
        assert many.scaling == many.alone / many.step.seconds < 1


def test_more_ports_a_machine_hide_more_of_the_communication(plan: Plans) -> None:
    scaling = [plan(gpus=gpus, nodes=8).report.scaling for gpus in (8, 16, 64)]
    assert scaling == sorted(scaling) and scaling[0] < scaling[-1]


# -------------------------------------------------------------------------------------------------------------- memory


def test_host_memory_and_batches_are_those_of_a_machine(plan: Plans) -> None:
    keys = {"offload_residual": True, "recompute": False}
    eight, more = plan(gpus=8, **keys).report, plan(gpus=32, nodes=4, **keys).report
    assert eight.pinned_bytes > 0 and more.host_bytes == eight.host_bytes
    assert eight.host_bytes["total"] == 8 * plan(**keys).report.host_bytes["total"]
    assert more.device_bytes["activations"] == eight.device_bytes["activations"]


@pytest.mark.parametrize(
    ("keys", "copies"),
    [
        ({"offload_optimizer": True}, 1),
        ({"offload_grads": True, "zero_level": 2}, 1),
        ({"offload_weights": True, "zero_level": 3}, 1),
        ({"offload_weights": True}, 8),
    ],
)
def test_pinned_memory_is_summed_over_the_ranks_of_a_machine(plan: Plans, keys: Mapping[str, Any], copies: int) -> None:
    """Ranks that divide what they keep on the host together pin what one pins alone, and whole values 8 times that."""
    alone = plan(**{key: value for key, value in keys.items() if key != "zero_level"}).report.pinned_bytes
    eight = plan(gpus=8, keys=keys)
    held = eight.assembly.memory.host
    assert held is not None and eight.report.pinned_bytes == 8 * held.nbytes, "what each rank allocates"
    assert eight.report.pinned_bytes == pytest.approx(copies * alone, rel=0.01)
    two = plan(gpus=16, nodes=2, keys=keys).report
    assert two.pinned_bytes == pytest.approx((copies if copies > 1 else 0.5) * alone, rel=0.01)
    little = {"host_memory_limit": eight.report.pinned_bytes - 1}
    assert plan(gpus=8, keys={**keys, **little}).report.missing_host_bytes == 1


def test_ranks_on_one_gpu_share_its_memory_and_what_cuda_takes(plan: Plans) -> None:
    one, four = plan(recompute=False), plan(recompute=False, ranks_per_gpu=4)
    assert (four.report.world_size, four.report.devices, four.report.tokens) == (4, 1, 4 * one.report.tokens)
    taken = one.report.device.runtime_bytes
    inputs = one.report.device_bytes["runtime"] - taken
    assert four.report.device_bytes["runtime"] == taken + 4 * inputs, "no NCCL on one GPU"
    for part, copies in (("weights", 4), ("gradients", 4), ("optimizer", 1)):
        assert four.report.device_bytes[part] == pytest.approx(copies * one.report.device_bytes[part], rel=0.01)
    assert four.report.host_bytes["batches"] == 4 * one.report.host_bytes["batches"]
    assert four.report.step.seconds > 3 * one.report.step.seconds > 0, "ranks take turns"
    several = plan(recompute=False, ranks_per_gpu=4, gpus=2).report
    assert several.world_size == 8
    assert several.device_bytes["runtime"] == four.report.device_bytes["runtime"] + COLLECTIVE_BYTES + GATHER_BYTES


def test_ranks_that_do_not_fit_together_recompute_more(plan: Plans) -> None:
    keys = {"per_device_train_batch_size": 4, "sequence_len": 2048}
    room = plan(**keys, recompute=False).report.device_bytes["total"] / (1 << 30)
    limit = {"device_memory_limit": f"{2 * room - 1:.2f}GiB"}
    assert plan(**keys, **limit, recompute=False).report.fits
    assert not plan(**keys, **limit, recompute=False, ranks_per_gpu=3).report.fits
    auto = plan(**keys, **limit, ranks_per_gpu=3)
    assert auto.report.fits and auto.chosen is not None
    assert -auto.report.missing_bytes < 0.1 * auto.report.device.memory_bytes, "no more than it must"


def test_the_text_says_that_ranks_share_a_device(tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    config.write_text(json.dumps({"model": str(MODEL), "from_scratch": True, "ranks_per_gpu": 4}))
    opened = run.open_run(run.load(config))
    text = "\n".join(plan_text(opened, run.plan(opened, "h200"), "", ""))
    assert "on each of 4 ranks\n4 ranks share each device" in text and "scale:" not in text


# ------------------------------------------------------------------------------------------------------------ how many


def test_without_a_number_each_machine_has_the_gpus_of_the_key(plan: Plans) -> None:
    def counts(**given: Any) -> tuple[int, int]:
        report = plan(**given).report
        return report.devices, report.nodes

    asked = {"gpus": 8}
    assert counts(keys=asked) == (8, 1) and counts(keys=asked, nodes=2) == (16, 2)
    assert counts(keys=asked, gpus=4, nodes=2) == (4, 2) and counts(keys={"gpus": 0}) == (1, 1)


@pytest.mark.parametrize(
    ("gpus", "nodes", "error"),
    [
        (10, 4, r"10 GPUs .* 4 machines\. Use --gpus 12, or --nodes 2\."),
        (2, 3, r"Use --gpus 3, or --nodes 2\."),
        (0, 1, "at least --gpus 1"),
        (4, 0, "--nodes 1"),
    ],
)
def test_gpus_that_cannot_be_spread_evenly_are_refused(plan: Plans, gpus: int, nodes: int, error: str) -> None:
    with pytest.raises(ConfigError, match=error):
        plan(gpus=gpus, nodes=nodes)


def test_a_cpu_has_any_number_of_ranks_but_no_other_cpus(plan: Plans) -> None:
    one, two = plan("cpu").report, plan("cpu", ranks_per_gpu=2).report
    assert (two.world_size, two.devices) == (2, 1)
    assert two.device_bytes["weights"] == 2 * one.device_bytes["weights"]
    assert two.device_bytes["runtime"] < one.device_bytes["runtime"] + COLLECTIVE_BYTES
    for gpus, nodes in ((2, 1), (None, 2)):
        with pytest.raises(ConfigError, match="a CPU trains alone"):
            plan("cpu", gpus, nodes)
