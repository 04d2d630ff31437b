"""Errors in functions of plugins are attributed to the plugin, and others are not."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
from made_up_plugins import Install
from typer.testing import CliRunner
from whole_plugin import ADAPTER, BOOM, FORMAT, MODEL, OPTIMIZER, the_error, whole_plugin, write_config

from surogate.cli.app import app
from surogate_core.api import CheckpointForm
from surogate_core.assembly.passes import accumulate
from surogate_core.errors import PluginError, ProgramError
from surogate_core.plugins.attribution import UNWRAPPED
from surogate_core.plugins.discovery import load_registry
from surogate_core.plugins.hookspecs import KINDS
from surogate_core.program.builder import Builder
from surogate_core.reference.ops import load
from surogate_core.runtime.reference import ReferenceCall


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    yield from whole_plugin(tmp_path, monkeypatch)


FUNCTIONS = {
    (kind, f"{path}{f.name}")
    for kind, cls, path in [*((k, c, "") for k, c in KINDS.items()), ("weight format", CheckpointForm, "checkpoints.")]
    for f in fields(cls)
    if "Callable[" in str(f.type)
}


@pytest.mark.parametrize(("kind", "function"), sorted(FUNCTIONS - UNWRAPPED))
def test_a_function_that_raises_is_named(install: Install, kind: str, function: str) -> None:
    nested, _, name = function.rpartition(".")
    changed = "change_form(" if nested else f'change("{"TWICE" if kind == "op" else kind.upper().replace(" ", "_")}", '
    install("acme", "0.1.0", "zz", f"{changed}{name}=boom)")
    registry = load_registry()
    (definition,) = [
        p.definition
        for p in registry.provided
        if p.kind == kind and p.plugin.distribution == "acme" and p.name != "acme_sgd"
    ]
    with pytest.raises(PluginError, match=rf"^{kind} \S+ of acme 0.1.0 failed in {function}: {BOOM}$") as caught:
        attrgetter(function)(definition)(None, None, None)
    assert isinstance(caught.value.__cause__, KeyError)


def test_errors_in_functions_of_a_merge_name_the_plugin_too(install: Install) -> None:
    install("acme", "0.1.0", "zz", 'change("ADAPTER", merge=lambda folder: Merge("base", {"w": boom}))')
    merge = load_registry().adapter("acme").merge(None)
    with pytest.raises(PluginError, match=rf"{ADAPTER} failed in merge of w: {BOOM}"):
        merge.changes["w"](None)


def test_a_plugin_s_own_config_error_passes_unchanged(tmp_path: Path, install: Install) -> None:
    patch = 'def refuse(*a):\n    raise ConfigError("acme_rate: too low")\nchange("OPTIMIZER", update=refuse)'
    install("acme", "0.1.0", "zz", patch)
    assert the_error(CliRunner().invoke(app, ["plan", str(write_config(tmp_path))])) == "acme_rate: too low"


def test_errors_of_a_run_are_not_attributed_to_its_launcher(tmp_path: Path, install: Install) -> None:
    install("acme", "0.1.0", "zz", 'change("FORMAT", encode=boom)')
    path = write_config(tmp_path, launcher="acme")
    assert f"{FORMAT} failed in encode" in the_error(CliRunner().invoke(app, ["train", str(path)]))


def test_errors_of_core_are_not_attributed_to_a_plugin(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("acme", "0.1.0", "zz", "")

    def broken(*args: Any) -> Any:
        raise ProgramError("a pass of core is wrong")

    monkeypatch.setattr(accumulate, "accumulate", broken)
    result = CliRunner().invoke(app, ["plan", str(write_config(tmp_path, recipe="acme"))])
    assert result.exit_code == 1 and isinstance(result.exception, ProgramError)
    assert str(result.exception) == "a pass of core is wrong"


def test_a_definition_of_core_is_not_wrapped() -> None:
    registry = load_registry()
    core = [item.definition for item in registry.provided if item.plugin.distribution == "surogate-core"]
    assert core and all(definition.origin is None for definition in core)
    assert str(registry.recipe("bf16").origin) == "recipe bf16 of surogate-recipe-bf16 0.2.0"


def test_a_standard_op_that_fails_on_the_value_of_a_plugin_names_who_emitted_it(install: Install) -> None:
    patch = 'change("MODEL", dims=lambda b: b.apply("fill", shape=(2.5,), dtype="fp32", value=0.0))'
    install("acme", "0.1.0", "zz", patch)
    registry = load_registry()
    builder = Builder(registry.ops, "fp32")
    with pytest.raises(PluginError), builder.record("forward") as emitted:
        registry.source("model", "acme_model").definition.dims(builder)  # refuses the result, but has emitted an op
    call = ReferenceCall(emitted[0], load("surogate_core.reference.ops:fill"), (), ())
    with pytest.raises(ProgramError, match=rf"^fill \(.*emitted at .*acme_zz\.py:\d+ by {MODEL}\) failed: TypeError: "):
        call.run()


@pytest.mark.parametrize("wanted", ["1", "0"])
def test_the_traceback_is_shown_on_request(
    tmp_path: Path, install: Install, monkeypatch: pytest.MonkeyPatch, wanted: str
) -> None:
    monkeypatch.setenv("SUROGATE_TRACEBACK", wanted)
    install("acme", "0.1.0", "zz", 'change("OPTIMIZER", update=boom)')
    result = CliRunner().invoke(app, ["plan", str(write_config(tmp_path))])
    assert ("Traceback (most recent call last)" in result.output) == (wanted == "1")
    assert ("SUROGATE_TRACEBACK=1 shows the traceback." in result.output) == (wanted == "0")
    assert result.output.splitlines()[-1].startswith(f"error: {OPTIMIZER} failed in update: KeyError: 'boom'")


def test_a_logger_that_fails_in_a_step_is_named_and_no_longer_called(tmp_path: Path, install: Install) -> None:
    reports = "report=boom, close=boom"
    patch = f'change("LOGGER", always=True, open=lambda i, o: SimpleNamespace({reports}))'
    install("acme", "0.1.0", "zz", patch)
    result = CliRunner().invoke(app, ["train", str(write_config(tmp_path))])
    assert result.exit_code == 0
    assert "logger acme of acme 0.1.0 failed and gets no more reports: KeyError: 'boom'" in result.output


def test_a_command_that_fails_names_its_distribution(install: Install) -> None:
    source = "def command() -> None:\n    raise KeyError('boom')"
    install("acme-commands", "1.0", "hello", source, group="surogate.commands", head="")
    assert the_error(CliRunner().invoke(app, ["hello"])).startswith(
        "command 'hello' of acme-commands 1.0 failed: KeyError: 'boom'"
    )


@pytest.mark.slow
@pytest.mark.parametrize(
    ("patch", "command", "message"),
    [
        ("import no_such_module", "plan", "No module named 'no_such_module'"),
        ('change("OPTIMIZER", update=boom)', "plan", f"{OPTIMIZER} failed in update: {BOOM}"),
        ('change("SGD", reference="acme_reference:writes")', "train", "acme_sgd of acme 0.1.0 .*wrote to its input 1"),
    ],
)
def test_a_process_ends_in_the_same_line(
    tmp_path: Path, install: Install, patch: str, command: str, message: str
) -> None:
    install("acme", "0.1.0", "zz", patch)
    keys: dict[str, Any] = {"datasets": []} if command == "plan" else {}
    environ = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, "-m", "surogate.cli", command, str(write_config(tmp_path, **keys))]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == 2 and "Traceback" not in done.stderr
    assert re.search(f"^error: .*{message}", done.stderr.splitlines()[-1])
