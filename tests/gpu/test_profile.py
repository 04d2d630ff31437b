"""`surogate profile` on the GPU: ops are timed inside the captured graphs of the run's own step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from end_to_end.product import environment, make_workplace, write_model

from surogate import run
from surogate_core.runtime.worker import Worker
from surogate_profile.batches import fill, from_data
from surogate_profile.measure import measure
from surogate_profile.profiling import profile
from surogate_profile.step_profile import StepProfile

from .harness import SMALL

pytestmark = pytest.mark.gpu

GRAPHS = "CUDA graphs with an event between ops"


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, value in environment(tmp_path).items():
        monkeypatch.setenv(name, value)
    workplace = make_workplace(tmp_path)
    write_model(tmp_path / "model", **{**SMALL, "vocab_size": 2048, "rope_parameters": None})
    return workplace.write(model_dtype="bf16", sequence_len=512, per_device_train_batch_size=2)


def profiled(config: Path, *overrides: str) -> StepProfile:
    adapted = "lora=true" in overrides
    return profile(config, overrides, steps=3, use_random_weights=adapted, notice=lambda line: None)


def calls(result: StepProfile) -> dict[str, float]:
    """Mean calls of an op, by program without the number of documents."""
    programs = {group.ops[0].program: group.calls / len(group.ops) for group in result.by_program()}
    found: dict[str, float] = {}
    for name, count in programs.items():
        found[name.partition("@")[0]] = found.get(name.partition("@")[0], 0) + count
    return found


@pytest.mark.parametrize("overrides", [(), ("lora=true", "from_scratch=false"), ("lmhead_chunks=8",)])
def test_every_op_of_the_captured_step_is_timed(config: Path, overrides: tuple[str, ...]) -> None:
    result = profiled(config, "gradient_accumulation_steps=3", *overrides)
    assert result.method == GRAPHS
    assert calls(result) == pytest.approx({"micro_first": 1, "micro_next": 2, "update": 1})
    assert all(timed.seconds >= 0 for timed in result.ops) and result.event_seconds >= 0
    assert result.total.seconds + result.gaps == pytest.approx(result.seconds)
    products = [timed for timed in result.ops if timed.op.kind.startswith("linear")]
    assert products and all(timed.seconds > 0 for timed in products)


def test_eager_launches_are_timed_where_graphs_are_off(config: Path) -> None:
    result = profiled(config, "use_cuda_graphs=false")
    assert result.method == "events between eager launches"
    assert calls(result) == pytest.approx({"micro_first": 1, "micro_next": 1, "update": 1})
    assert result.gaps >= 0


def test_measuring_changes_no_weight_and_blows_up_nothing(config: Path) -> None:
    loaded = run.load(config, ["master_dtype=bf16", "learning_rate=1.0"])
    opened = run.open_run(loaded)
    plan = run.plan(opened)
    batches = from_data(run.tokenize(loaded, lambda line: None), opened.config, 3)
    worker = run.make_worker(opened, plan)
    assert isinstance(worker, Worker)
    fill(opened, plan.assembly, worker, random=False)
    worker.start()
    before = worker.buffers.segment("param").clone()
    times = measure(worker, batches.steps)
    worker.settle()
    assert torch.equal(before, worker.buffers.segment("param"))
    assert times.method == GRAPHS and len(times.steps) == 3
    values = [v for v in plan.assembly.declared if v.role in ("grad", "state")]
    assert all(bool(torch.isfinite(worker.buffers.persistent(v).float()).all()) for v in values)
    worker.close()
