"""The start of the command line: quick, without torch, and with the exit codes that scripts rely on."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import typer
from end_to_end.product import COMMAND, EXAMPLES, invoke

from surogate.cli import app as cli
from surogate.cli.external import CORE_COMMANDS
from surogate_core.errors import ConfigError, PluginError, ProgramError, RunStopped

ROOT = Path(__file__).parents[1]


HEAVY = ("pydantic", "pluggy", "numpy", "torch", "transformers", "datasets", "pyarrow", "matplotlib", "peft")
"""Packages that take tenths of a second or more to import."""


def imported(*args: str) -> set[str]:
    """Return which of HEAVY, and which plugins, `surogate args` imports."""
    code = (
        "import sys\n"
        "from surogate.cli.app import main\n"
        f"sys.argv = ['surogate', *{args!r}]\n"
        "try:\n    main()\n"
        "finally:\n    print('IMPORTED', *sorted({name.partition('.')[0] for name in sys.modules}))\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=300)
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("IMPORTED")]
    names = set(line.split()[1:])
    return {name for name in names if name in HEAVY or (name.startswith("surogate_") and name != "surogate_core")}


PLUGINS = {"surogate_models", "surogate_recipes_bf16", "surogate_recipes_fp8", "surogate_recipes_nvfp4"}
PLUGINS |= {"surogate_models_olmo", "surogate_models_phi", "surogate_models_mistral", "surogate_models_gemma"}
PLUGINS |= {"surogate_models_moe", "surogate_models_hybrid", "surogate_models_gptoss", "surogate_export_gguf"}
PLUGINS |= {"surogate_models_muse", "surogate_models_mla"}
PLUGINS |= {"surogate_optim_adamw", "surogate_lora", "surogate_dora"}
PLUGINS |= {"surogate_optim_adamw_8bit", "surogate_optim_normuon", "surogate_log_tensorboard", "surogate_log_wandb"}
PLUGINS |= {"surogate_log_mlflow"}
PLUGINS |= {"surogate_offload_residual", "surogate_offload_states", "surogate_launch_env", "surogate_launch_ray"}
PLUGINS |= {"surogate_loss_tokens", "surogate_loss_preference", "surogate_loss_distillation"}
PLUGINS |= {"surogate_qlora_nf4", "surogate_qlora_fp8", "surogate_qlora_fp4", "surogate_qlora_mxfp4"}


@pytest.mark.parametrize("args", [["--help"], ["--version"]])
def test_help_and_version_read_metadata_alone(args: list[str]) -> None:
    assert imported(*args) == set()


@pytest.mark.parametrize("command", ["train", "plan"])
def test_help_of_a_command_imports_only_what_typer_imports(command: str) -> None:
    """Recent versions of typer parse arguments with pydantic."""
    assert imported(command, "--help") <= {"pydantic"}


@pytest.mark.parametrize(
    ("args", "needed"),
    [
        (["plugins"], {"pydantic", "pluggy"}),
        (["doctor"], {"pydantic", "pluggy"}),
        (["plan", "examples/quickstart.yaml"], {"pydantic", "pluggy"}),
    ],
)
def test_commands_that_do_not_compute_import_no_torch(
    args: list[str], needed: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    assert imported(*args) - PLUGINS == needed


def test_a_run_imports_torch_but_neither_transformers_nor_matplotlib_before_its_last_step(tmp_path: Path) -> None:
    """transformers takes seconds to import; another process loads the outputs. The rest is the start-up of a run."""
    code = (
        "import sys\n"
        "from surogate import run\nfrom surogate.training import trainer\n"
        "train = trainer.train\n"
        "def seen(*arguments):\n"
        "    train(*arguments)\n"
        "    print('IMPORTED', *sorted({name.partition('.')[0] for name in sys.modules}))\n"
        "trainer.train = seen\n"
        f"keys = ['output_dir={tmp_path}', 'max_steps=1', 'warmup_steps=0', 'eval_steps=0', 'save_steps=0']\n"
        "keys += ['validation_split_ratio=0', 'verify_outputs=false', 'log_gpu_util=0']\n"
        "run.train(run.load('examples/quickstart.yaml', keys))\n"
        "print('AFTER', 'transformers' in sys.modules)\n"
    )
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": ""}
    result = subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environ, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    (line,) = [line for line in result.stdout.splitlines() if line.startswith("IMPORTED")]
    assert set(line.split()) & set(HEAVY) == {"pydantic", "pluggy", "numpy", "torch"}
    assert "AFTER False" in result.stdout


def test_the_process_that_loads_outputs_imports_little_of_core() -> None:
    code = "import sys, surogate.outputs.check_process\nprint([n for n in sys.modules if 'surogate' in n])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "surogate_core.api" not in done.stdout and "surogate.outputs.check_process" in done.stdout


def test_timing_prints_where_a_command_spent_its_time() -> None:
    marks = "mark('one')\nmark('two')\nprint_phases()\nprint_phases()"
    code = f"from surogate_core.machine.timing import mark, print_phases\n{marks}"
    lines = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"SUROGATE_TIMING": "1"}, capture_output=True, text=True
    ).stderr.split("\n")[2:-1]
    assert [line.split()[-1] for line in lines] == ["one", "two", "end"]
    ends = [float(line.split()[2]) for line in lines]
    assert ends == sorted(ends)
    assert sum(float(line.split()[0]) for line in lines) == pytest.approx(ends[-1], abs=0.02)


def test_without_a_command_help_is_printed_and_the_exit_code_is_2() -> None:
    result = subprocess.run(COMMAND, capture_output=True, text=True, check=False, timeout=60)
    assert result.returncode == 2
    assert "Usage: surogate" in result.stdout + result.stderr


@pytest.mark.parametrize("command", ["train", "pt", "sft", "plan"])
def test_without_a_config_help_is_printed_and_the_exit_code_is_2(command: str) -> None:
    result = invoke(command)
    assert result.returncode == 2
    assert f"Usage: surogate {command}" in result.stderr
    assert f"No config file. Give one: surogate {command} run.yaml" in result.stderr


@pytest.mark.parametrize(("seconds", "in_terminal", "lines"), [(0.0, True, 1), (600.0, True, 0), (0.0, False, 0)])
def test_a_command_that_is_silent_for_long_says_in_a_terminal_that_it_works(
    seconds: float, in_terminal: bool, lines: int
) -> None:
    code = (
        "import sys, surogate.cli.options as options\n"
        "from surogate.cli.app import main\n"
        f"options.SILENT_SECONDS = {seconds}\nsys.stderr.isatty = lambda: {in_terminal}\n"
        f"sys.argv = ['surogate', 'plan', {str(EXAMPLES / 'quickstart.yaml')!r}, '--device', 'h200']\nmain()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=EXAMPLES.parent)
    assert done.stderr.count("surogate plan: at work, which may take some time\n") == lines
    assert "at work" not in done.stdout


def test_an_unknown_command_or_option_is_a_message_and_2() -> None:
    for args in (["trian"], ["plan", "--devise", "h200"]):
        result = invoke(*args)
        assert result.returncode == 2
        assert "Traceback" not in result.stderr


def test_two_different_config_files_are_refused() -> None:
    result = invoke("plan", "a.yaml", "--config", "b.yaml")
    assert (result.returncode, result.stderr) == (2, "error: two config files: a.yaml and --config b.yaml. Give one\n")


def test_a_missing_config_file_is_one_message_and_2(tmp_path: Path) -> None:
    result = invoke("train", str(tmp_path / "absent.yaml"))
    assert result.returncode == 2
    assert "absent.yaml" in result.stderr
    assert "Traceback" not in result.stderr


def test_the_core_commands_are_the_ones_that_cannot_be_replaced() -> None:
    group = typer.main.get_group(cli.app)
    assert tuple(group.commands) == CORE_COMMANDS


@pytest.mark.parametrize(
    ("error", "code"),
    [(ConfigError("bad key"), 2), (PluginError("bad plugin"), 2), (RunStopped("disk full"), 3)],
)
def test_an_error_of_the_user_or_the_run_is_one_line_and_its_exit_code(
    error: Exception, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert _run_raising(error, monkeypatch) == code
    assert capsys.readouterr().err == f"error: {error}\n"


def test_an_interrupt_is_130_and_is_told(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    assert _run_raising(KeyboardInterrupt(), monkeypatch) == 130
    assert capsys.readouterr().err == "\ninterrupted\n"


@pytest.mark.parametrize("error", [ProgramError("op 3 reads what nobody wrote"), ZeroDivisionError()])
def test_an_error_in_our_code_is_an_exception_with_its_traceback(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(type(error)):
        _run_raising(error, monkeypatch)


def _run_raising(error: BaseException, monkeypatch: pytest.MonkeyPatch) -> int:
    def fail(config: None, as_json: bool) -> int:
        raise error

    monkeypatch.setattr("surogate.cli.plugins.plugins_command", fail)
    monkeypatch.setattr(sys, "argv", ["surogate", "plugins"])
    # As in a new process: with a thread that another test left behind, `main` would end this process.
    monkeypatch.delitem(sys.modules, "surogate_core.runtime.threads", raising=False)
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert isinstance(exit_.value.code, int)
    return exit_.value.code


def test_a_reader_that_exits_is_not_an_error() -> None:
    command = f"{' '.join(COMMAND)} plugins --json; echo $? >&2"
    result = subprocess.run(
        ["bash", "-c", f"({command}) | true"], capture_output=True, text=True, check=False, timeout=60
    )
    assert result.stderr in ("141\n", "0\n")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full on this system")
def test_a_full_disk_behind_stdout_is_one_line_and_code_3() -> None:
    with open("/dev/full", "w") as full:
        for arguments in (["plugins"], ["--help"]):
            done = subprocess.run([*COMMAND, *arguments], stdout=full, stderr=subprocess.PIPE, text=True, timeout=60)
            assert (done.returncode, done.stderr) == (
                3,
                "error: stdout: cannot be written: No space left on device. Write it elsewhere.\n",
            )


def test_a_terminal_with_few_characters_shows_the_others_by_number() -> None:
    environment = {**os.environ, "PYTHONIOENCODING": "ascii"}
    code = "from surogate.cli import app; app.app = lambda **_: print('a\\u23ceb'); app.main()"
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, timeout=60)
    assert (done.stdout, done.stderr) == ("a\\u23ceb\n", "")
