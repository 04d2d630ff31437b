from __future__ import annotations

from pathlib import Path

import pytest

from surogate import run

ROOT = Path(__file__).parents[1]


def test_more_blocks_on_the_host_leave_more_memory_on_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    reports = [
        run.plan(run.load("example/run.yaml", [f"acme_toy_blocks={blocks}"]), device="h100").report
        for blocks in (0, 1, 2)
    ]
    pinned = [report.pinned_bytes for report in reports]
    assert pinned[0] < pinned[1] < pinned[2]
