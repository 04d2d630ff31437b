"""`surogate export` in a quantized format: its memory, its threads, and what a killed one leaves."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from end_to_end.product import contents, invoke
from end_to_end.test_export_formats import draw
from models.test_supported import config_of

from surogate import run

FORMATS = ("fp8-blocks", "fp8-channel", "nvfp4", "nf4")
WIDE = {"hidden_size": 512, "intermediate_size": 1024, "head_dim": 128, "num_attention_heads": 4}
MIB = 1 << 20

MEASURED = r"""
import json, re, sys
from surogate import run
from surogate.checkpoints import rewriting

rewriting.HELD_BYTES, rewriting.AHEAD_BYTES = int(sys.argv[1]), int(sys.argv[1])
peaks = {}
for format in sys.argv[4:]:
    open("/proc/self/clear_refs", "w").write("5")  # the peak begins anew
    run.export(sys.argv[2], f"{sys.argv[3]}/{format}", format=format, notice=lambda line: None)
    peaks[format] = int(re.search(r"VmHWM:\s+(\d+)", open("/proc/self/status").read())[1]) * 1024
print(json.dumps(peaks))
"""
"""Exports a model in formats, with so many bytes of computed tensors in memory, and prints the peak of each."""

KILLED = r"""
import os, signal, sys
from surogate.checkpoints import rewriting
from surogate.cli.app import main

write = rewriting.write_safetensors
def killed(*args):
    write(*args)
    os.kill(os.getpid(), signal.SIGKILL)
rewriting.write_safetensors = killed
sys.argv[1:] = ["export", *sys.argv[1:]]
main()
"""
"""The command, in a process that is killed when it has written its first file."""


def peaks(bound: int, model: Path, output: Path) -> dict[str, int]:
    command = [sys.executable, "-c", MEASURED, str(bound), str(model), str(output), "fp8-channel", "nvfp4"]
    environment = os.environ | {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    found: dict[str, int] = json.loads(done.stdout)
    return found


def weights(model: Path) -> int:
    return sum(path.stat().st_size for path in model.glob("*.safetensors"))


@pytest.mark.slow
def test_memory_is_that_of_some_matrices_and_not_of_the_model(tmp_path: Path) -> None:
    """Bounds of 4 MiB in place of 1 GiB: a matrix has 1 MiB. What is written of the larger model has 32 and 18 more."""
    few = draw(tmp_path / "few", config_of("llama", layers=2) | WIDE)
    many = draw(tmp_path / "many", config_of("llama", layers=16) | WIDE)
    assert weights(many) - weights(few) > 60 * MIB
    one, other = (peaks(4 * MIB, model, tmp_path / f"{model.name}-out") for model in (few, many))
    more = {format: (other[format] - one[format]) / MIB for format in one}
    print({format: f"{peak / MIB:.1f}" for format, peak in other.items()}, more)
    assert max(more.values()) < 12, more


@pytest.mark.parametrize("format", FORMATS)
def test_one_thread_and_several_write_the_same_bytes(
    format: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = draw(tmp_path / "model", config_of("llama", layers=4) | WIDE)
    for cores in (1, 2, 5):
        monkeypatch.setattr(os, "sched_getaffinity", lambda pid, n=cores: set(range(n)))
        run.export(model, tmp_path / str(cores), format=format, notice=lambda line: None)
    assert contents(tmp_path / "1") == contents(tmp_path / "2") == contents(tmp_path / "5")


def test_the_command_of_a_killed_export_can_be_repeated(tmp_path: Path) -> None:
    model = draw(tmp_path / "model", config_of("llama"))
    given: list[Any] = [model, tmp_path / "out", "--format", "fp8-channel"]
    killed = subprocess.run([sys.executable, "-c", KILLED, *map(str, given)], capture_output=True, text=True)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    left = [path.name for path in (tmp_path / "out").iterdir()]
    assert left and not [name for name in left if not name.startswith(".")]  # hidden: nothing loads it
    done = invoke("export", *given)
    assert done.returncode == 0, done.stderr
    run.export(model, tmp_path / "other", format="fp8-channel", notice=lambda line: None)
    assert contents(tmp_path / "out") == contents(tmp_path / "other")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == sorted(
        path.name for path in (tmp_path / "other").iterdir()
    )
