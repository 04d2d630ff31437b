"""`Plan.memory_timeline` and `Plan.step_work`: no byte and no second of a plan is lost or counted twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from models.harness import tiny_config

from surogate import run
from surogate.runs.plan_json import timeline_json, to_json
from surogate_core.memory.lifetimes import live_bytes
from surogate_core.planning.plan import Plan

RUNS: dict[str, dict[str, Any]] = {
    "all weights": {},
    "lora": {"lora": True, "per_device_train_batch_size": 2},
    "fp8": {"recipe": "fp8-hybrid"},
    "recomputed": {"recompute_block": True},
    "accumulated": {"gradient_accumulation_steps": 3},
    "offloaded residual": {"offload_residual": True},
    "offloaded states": {"offload_optimizer": True, "offload_grads": True},
    "two ranks on a GPU": {"gpus": 1, "ranks_per_gpu": 2},
}
each = pytest.mark.parametrize("name", RUNS)


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Plan]:
    """Return a function that plans a small model, each run once: key=value ... -> its plan."""
    folder, made = tmp_path_factory.mktemp("model"), dict[str, Plan]()
    sizes = {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 3, "vocab_size": 512}
    (folder / "config.json").write_text(json.dumps(tiny_config(max_position_embeddings=512, **sizes)))

    def plan_of(gpus: int | None = None, **keys: Any) -> Plan:
        text = json.dumps({"model": str(folder), "sequence_len": 256, "model_dtype": "bf16"} | keys)
        if f"{gpus} {text}" not in made:
            (folder / "run.yaml").write_text(text)
            made[f"{gpus} {text}"] = run.plan(run.load(folder / "run.yaml"), "h200", gpus)
        return made[f"{gpus} {text}"]

    return plan_of


@each
def test_the_causes_at_each_op_are_all_live_bytes(plan: Callable[..., Plan], name: str) -> None:
    made = plan(**RUNS[name])
    timeline, ranks = made.memory_timeline(), made.inputs.ranks_per_device
    arena = made.assembly.memory.arenas[timeline.program]
    live = [n * ranks for n in live_bytes(arena.lives, len(timeline.ops))]
    assert [sum(values) for values in zip(*timeline.causes.values(), strict=True)] == live
    assert live[timeline.peak] == max(live) == arena.lower_bound * ranks


@each
def test_the_peak_and_its_gaps_are_the_total_of_the_plan(plan: Callable[..., Plan], name: str) -> None:
    made = plan(**RUNS[name])
    timeline = made.memory_timeline()
    assert timeline.gaps >= 0
    assert timeline.totals[timeline.peak] + timeline.gaps == made.report.device_bytes["total"]
    assert max(timeline.totals) == timeline.totals[timeline.peak]


@each
def test_the_values_at_the_peak_are_those_of_the_report(plan: Callable[..., Plan], name: str) -> None:
    made = plan(**RUNS[name])
    timeline, ranks = made.memory_timeline(), made.inputs.ranks_per_device
    found = {cause: timeline.causes[cause][timeline.peak] for cause in timeline.held}
    assert found == {cause: n * ranks for cause, n in made.report.activations_by_label.items()}
    for cause, held in timeline.held.items():
        assert held.largest * ranks <= found[cause] <= held.values * held.largest * ranks


@each
def test_the_document_of_a_timeline_has_the_bytes_of_every_op(plan: Callable[..., Plan], name: str) -> None:
    timeline = plan(**RUNS[name]).memory_timeline()
    document = json.loads(json.dumps(timeline_json(timeline)))
    for cause, changes in document["causes"].items():
        values, steps = [], dict(changes)
        for at in range(len(timeline.ops)):
            values.append(steps.get(at, values[-1] if at else 0))
        assert values == list(timeline.causes[cause]), cause
    told = zip(document["kind"], document["phase"], document["block"], strict=True)
    found = [(document["kinds"][kind], document["phases"][phase], block) for kind, phase, block in told]
    assert found == [(op.kind, op.phase, op.block) for op in timeline.ops]


@each
def test_the_work_of_a_step_is_that_of_all_its_ops(plan: Callable[..., Plan], name: str) -> None:
    made = plan(**RUNS[name])
    work, step = made.step_work(), made.report.step
    ranks = made.inputs.ranks_per_device
    assert sum(kind.flops for kind in work.kinds) * ranks == step.flops
    assert sum(kind.bytes for kind in work.kinds) * ranks == step.bytes
    assert sum(work.phases.values()) == pytest.approx(sum(kind.seconds for kind in work.kinds))
    assert [kind.seconds for kind in work.kinds] == sorted((kind.seconds for kind in work.kinds), reverse=True)


def test_recomputed_work_is_no_work_of_the_model(plan: Callable[..., Plan]) -> None:
    kept, recomputed = plan(), plan(recompute_block=True)
    assert recomputed.report.step.flops > kept.report.step.flops
    assert recomputed.step_work().model_flops == kept.step_work().model_flops
    once, more = (plan(gradient_accumulation_steps=steps).step_work().model_flops for steps in (1, 3))
    assert more == 3 * once
    assert plan(gpus=4).step_work().model_flops == 4 * kept.step_work().model_flops


def test_the_flops_of_a_model_are_those_of_its_matrices(plan: Callable[..., Plan]) -> None:
    """6 N a token for the matrices, forward and backward, and attention on top: at most a tenth here."""
    made = plan()
    matrices = sum(v.size for v in made.assembly.params.values() if len(v.shape) == 2 and "embed" not in v.name)
    per_token = made.step_work().model_flops / made.report.tokens
    head = 0 if any("lm_head" in name for name in made.assembly.params) else 128 * 512
    assert 6 * (matrices + head) <= per_token < 6 * (matrices + head) * 1.5


def test_plan_json_says_what_the_peak_holds(plan: Callable[..., Plan]) -> None:
    made = plan()
    document = json.loads(json.dumps(to_json(made, "train", "a test", disk=None)))
    memory = document["memory"]
    held = sum(cause["bytes"] for cause in memory["causes"].values()) + sum(memory["fixed"].values())
    assert held == memory["peak"]["bytes"] == document["device_bytes"]["total"] - memory["gaps"]
    assert document["step"]["model_flops"] <= document["step"]["flops"]
    assert document["kinds"][0]["seconds"] == max(kind["seconds"] for kind in document["kinds"]) > 0
