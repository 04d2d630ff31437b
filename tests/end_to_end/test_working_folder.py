"""No command imports files of the folder that it is started in: neither modules nor plugins nor what children need."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
from end_to_end.product import Workplace, environment

from surogate.outputs.check import OutputCheck
from surogate.runs.run import Run
from surogate_core.errors import RunStopped

MODULES = (
    "json",
    "transformers",
    "peft",
    "torch",
    "numpy",
    "tokenizers",
    "typer",
    "yaml",
    "canary_plugin",
    "torch_c10d",
)


@pytest.fixture
def canaries(here: Workplace) -> Path:
    """Lay files with the names of modules, and a package with a plugin, into the working folder. Return what any of
    them writes."""
    written = here.root / "EXECUTED"
    for name in MODULES:
        (here.root / f"{name}.py").write_text(f"open({str(written)!r}, 'a').write('{name}\\n')\nraise SystemExit(9)\n")
    info = here.root / "evil-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: evil\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(
        "[surogate]\nevil = canary_plugin\n[surogate.commands]\nevil = canary_plugin:x\n"
    )
    return written


def start(place: Workplace, *words: str | Path, **how: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, *map(str, words)]
    env = environment(place.root, **how)
    return subprocess.run(command, capture_output=True, text=True, check=False, timeout=300, cwd=place.root, env=env)


@pytest.mark.parametrize("module", ["surogate", "surogate.cli", "surogate_core", "surogate_core.cli"])
def test_the_module_that_torchrun_starts_finds_nothing_of_the_working_folder(
    canaries: Path, here: Workplace, module: str
) -> None:
    done = start(here, "-m", module, "plugins")
    assert done.returncode == 0 and not canaries.exists(), done.stderr
    assert "surogate-core" in done.stdout and not re.search(r"\bevil\b", done.stdout + done.stderr)


def test_the_process_that_checks_outputs_finds_nothing_of_the_working_folder(canaries: Path, here: Workplace) -> None:
    with OutputCheck() as checking:
        checking.begin()
        assert checking._process is not None and checking._process.stdin is not None
        checking._process.stdin.write('["AutoModelForCausalLM", "nowhere"]\n[]')
        checking._process.stdin.close()
        assert checking._process.stdout is not None and checking._process.stdout.read() == '""\n'
    assert not canaries.exists()


def test_what_ends_the_process_that_checks_outputs_is_in_the_message(
    here: Workplace, monkeypatch: pytest.MonkeyPatch
) -> None:
    (here.root / "sitecustomize.py").write_text("raise SystemExit('no seat for this library')")
    monkeypatch.setenv("PYTHONPATH", str(here.root))
    run = Run.__new__(Run)
    object.__setattr__(run, "loaded", type("Loaded", (), {"config": type("Keys", (), {"output_dir": "out"})}))
    with OutputCheck() as checking:
        checking.begin()
        with pytest.raises(RunStopped) as stopped:
            checking.finish(run)
    said = str(stopped.value)
    assert "ended with exit code 1" in said and "no seat for this library" in said and "memory" not in said


def test_a_process_that_checks_outputs_and_is_killed_was_probably_out_of_memory(here: Workplace) -> None:
    run = Run.__new__(Run)
    object.__setattr__(run, "loaded", type("Loaded", (), {"config": type("Keys", (), {"output_dir": "out"})}))
    with OutputCheck() as checking:
        checking.begin()
        assert checking._process is not None
        checking._process.kill()
        with pytest.raises(RunStopped, match=r"exit code -9 \(probably out of memory\)\. Nothing was deleted"):
            checking.finish(run)


@pytest.mark.slow
@pytest.mark.parametrize("module", ["surogate", "-P surogate"])
def test_no_command_imports_a_file_of_the_working_folder(canaries: Path, here: Workplace, module: str) -> None:
    words = [*module.split()[:-1], "-m", "surogate"]
    given = {"max_steps": 1, "warmup_steps": 0, "eval_steps": 0, "save_steps": 0, "verify_outputs": True}
    base = start(here, *words, "train", here.write(**given, output_dir="base"))
    assert base.returncode == 0, base.stderr
    adapter = here.write(**given, output_dir="out", model="base", from_scratch=False, lora=True)
    assert start(here, *words, "train", adapter).returncode == 0
    assert start(here, *words, "merge", "out/adapter", "merged").returncode == 0
    for command in (
        ["plan", adapter],
        ["verify", adapter],
        ["watch", "out", "--once"],
        ["doctor"],
        ["tokenize", adapter],
    ):
        assert "Traceback" not in start(here, *words, *command).stderr
    assert not canaries.exists(), canaries.read_text()


@pytest.mark.slow
def test_a_restart_imports_no_file_of_the_working_folder(canaries: Path, here: Workplace) -> None:
    code = (
        "import sys; sys.argv = ['surogate', 'plugins']\n"
        "from surogate.cli import train\n"
        "train.last_checkpoint = lambda config: 'step_00000001'\n"
        "from surogate import run\n"
        f"loaded = run.load({str(here.write(max_restarts=1))!r})\n"
        "train.restart_if_wanted(loaded.config, train.RunLost('lost'), print)\n"
    )
    done = start(here, "-P", "-c", code)
    assert done.returncode == 2 and "No such option: --set" in done.stderr, done.stderr
    assert not canaries.exists()
