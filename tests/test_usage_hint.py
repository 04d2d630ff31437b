"""The command line names what to write: for keys of the file, in its help, and in what `doctor` finds."""

from __future__ import annotations

import pytest
from end_to_end.product import invoke

from surogate.cli import doctor
from surogate.cli.external import said_of
from surogate_core.api import Finding
from surogate_core.plugins.registry import Plugin


@pytest.mark.parametrize(
    ("given", "printed"),
    [
        (["--max_steps", "5"], "which is set by --set max_steps=VALUE"),
        (["--learning-rate=1e-4"], "which is set by --set learning_rate=VALUE"),
        (["--lora_rank", "8"], "which is set by --set lora_rank=VALUE"),
        (["max_steps=5"], "set by --set max_steps=5"),
    ],
)
def test_a_key_of_the_file_on_the_command_line_is_answered_with_set(given: list[str], printed: str) -> None:
    done = invoke("plan", "run.yaml", *given)
    assert done.returncode == 2 and printed in " ".join(done.stderr.split())


def test_what_is_no_key_gets_no_hint() -> None:
    assert "--set" not in invoke("plan", "run.yaml", "--nonsense").stderr


def test_the_list_of_commands_cuts_no_sentence_off_and_training_shows_examples() -> None:
    assert "..." not in invoke("--help").stdout.partition("Commands:")[2]
    for command in ("train", "sft", "plan", "tokenize", "merge"):
        lines = invoke(command, "--help").stdout.splitlines()
        at = next(i for i, line in enumerate(lines) if line.strip() == "Examples:")
        assert lines[at + 1].strip().startswith(f"surogate {command} ")


def test_a_summary_says_what_each_command_of_its_distribution_does() -> None:
    summary = "surogate plugins test: Test what a plugin provides; surogate plugins trace: Show what it does"
    assert said_of("plugins test", summary) == "Test what a plugin provides."
    assert said_of("plugins trace", summary) == "Show what it does."
    assert said_of("watch", summary) == ""


def test_doctor_prints_findings_that_say_the_same_once(capsys: pytest.CaptureFixture[str]) -> None:
    plugins = [Plugin(name, name, "1", name) for name in ("one", "two")]
    found = [(plugin, Finding("ok", plugin.name, "kernels are not compiled")) for plugin in plugins]
    doctor._print_report(doctor.collect(), [*found, (plugins[0], Finding("ok", "gpu", "none found"))])
    printed = capsys.readouterr().out
    assert "ok: one, two: kernels are not compiled\n" in printed and "ok: gpu: none found (from one)" in printed
