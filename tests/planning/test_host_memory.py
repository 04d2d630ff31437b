"""Host memory that a run pins for offloading: checked by the plan, on this machine or by `host_memory_limit`."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from surogate import run
from surogate.cli.plan_text import plan_text
from surogate.runs.plan import plan_run
from surogate.runs.run import Run
from surogate.training import start as training
from surogate_core.errors import ConfigError
from surogate_core.machine.devices import device
from surogate_core.machine.local_device import LocalDevice
from surogate_core.planning.plan import Plan

MODEL = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 512,
    "hidden_size": 256,
    "num_hidden_layers": 6,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 512,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "tie_word_embeddings": False,
}
Plans = Callable[..., tuple[Run, Plan]]


@pytest.fixture
def plan(tmp_path: Path) -> Plans:
    """Return a function that plans a run with an offload strategy: (host memory, gpus, key=value ...)."""

    def planned(host_memory: int | None = None, gpus: int = 1, **keys: Any) -> tuple[Run, Plan]:
        (tmp_path / "config.json").write_text(json.dumps(MODEL))
        config = tmp_path / "run.yaml"
        config.write_text(json.dumps({"model": str(tmp_path), "from_scratch": True, "offload_residual": True} | keys))
        opened = run.open_run(run.load(config))
        return opened, plan_run(opened, device("h200"), gpus, host_memory=host_memory)

    return planned


def test_a_run_that_pins_more_than_the_host_has_is_refused(plan: Plans) -> None:
    opened, enough = plan(1 << 40)
    pinned = enough.report.pinned_bytes
    assert pinned > 0 and enough.report.fits and plan(pinned)[1].report.fits
    training.refuse_unless_it_fits(opened, enough)
    opened, planned = plan(pinned - 1)
    assert planned.report.missing_host_bytes == 1 and not planned.report.fits
    with pytest.raises(ConfigError, match=r"residual.* pins .* GiB of host memory, more than the .*host_memory_limit"):
        training.refuse_unless_it_fits(opened, planned)
    assert "more than the run may pin" in "\n".join(plan_text(opened, planned, "", ""))


def test_the_memory_is_that_of_all_gpus(plan: Plans) -> None:
    pinned = plan(None)[1].report.pinned_bytes
    assert plan(None, 2)[1].report.pinned_bytes == 2 * pinned
    assert not plan(pinned, 2)[1].report.fits


def test_host_memory_limit_replaces_what_the_machine_shows(plan: Plans) -> None:
    assert plan(1, host_memory_limit="64GiB")[1].report.fits
    opened, planned = plan(1 << 40, host_memory_limit="1MB")
    assert not planned.report.fits
    with pytest.raises(ConfigError, match=r"0\.0 of host_memory_limit.* raise host_memory_limit"):
        training.refuse_unless_it_fits(opened, planned)


def test_the_host_of_another_machine_is_shown_and_not_judged(plan: Plans) -> None:
    opened, planned = plan(None)
    assert planned.report.host_memory is None and planned.report.fits
    assert "not checked: host_memory_limit" in "\n".join(plan_text(opened, planned, "", ""))
    assert plan(0, offload_residual=False)[1].report.fits, "a run that pins nothing"


def test_a_plan_for_this_machine_knows_its_host(plan: Plans, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "pinnable_memory_bytes", lambda: 12345)
    opened, _ = plan()
    here = LocalDevice(replace(device("h200"), name="here"), 1, "this machine's GPU")
    assert run.plan(opened, here).report.host_memory == 12345
    assert run.plan(opened, "h200").report.host_memory is None
