"""Fixtures of the end-to-end tests: a user's directory for each test, and one finished run shared by many tests."""

from __future__ import annotations

import resource
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from end_to_end.product import Workplace, documents, environment, make_workplace, write_jsonl

from surogate.world import watch


@dataclass(frozen=True)
class Finished:
    """A finished run of ten steps, and its output."""

    workplace: Workplace
    stdout: str
    stderr: str

    @property
    def out(self) -> Path:
        return self.workplace.out


@pytest.fixture(scope="session")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Finished:
    """`surogate train` in a separate process. It evaluates every 5 steps, saves every 2, and keeps 3 checkpoints."""
    root = tmp_path_factory.mktemp("finished")
    held_out = write_jsonl(root / "held_out.jsonl", documents(30, skip=300))
    workplace = make_workplace(
        root,
        validation_datasets=[{"path": str(held_out), "type": "text"}],
        eval_steps=5,
        save_steps=2,
        save_total_limit=3,
    )
    done = workplace.surogate("train", workplace.write())
    assert done.returncode == 0, done.stdout + done.stderr
    return Finished(workplace, done.stdout, done.stderr)


@pytest.fixture
def workplace(tmp_path: Path) -> Workplace:
    return make_workplace(tmp_path)


@pytest.fixture
def here(workplace: Workplace, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workplace]:
    """A workplace for runs inside this process: the environment of a user, one thread."""
    import torch

    for name, value in environment(workplace.root).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delenv("SUROGATE_PLUGINS", raising=False)
    monkeypatch.setattr(watch, "GRACE_SECONDS", 600.0)  # a run that fails must not end the process of the test
    monkeypatch.chdir(workplace.root)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield workplace
    torch.set_num_threads(threads)


@pytest.fixture
def disk_limit() -> Iterator[None]:
    """The system refuses to write more than 300 KB into a file, as a disk without space does."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, before)
