"""Plugins of one file, which the key `plugins` and SUROGATE_PLUGINS name: loading, errors, whole runs, resuming."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from made_up_plugins import REFERENCE, WHOLE, Install, installing, outcome
from typer.testing import CliRunner, Result
from whole_plugin import write_config

from surogate import run
from surogate.cli.app import app
from surogate.config.load import load_config, resolved
from surogate.config.plugin_files import plugin_files
from surogate.training.start import task_of
from surogate.training.trainer import _compared
from surogate_core.errors import ConfigError, PluginError
from surogate_core.plugins import discovery, files
from surogate_core.plugins.discovery import load_registry
from surogate_core.plugins.provided import State

API = 'SUROGATE_API = {"loggers": 1}'

SPY = """
from surogate_core.api import LoggerDef, provides

SUROGATE_API = {"loggers": 1}

class Spy:
    def report(self, report):
        print(f"spied {report.step}")

surogate_loggers = provides([LoggerDef(name="spy", summary="", open=lambda info, options: Spy())])
"""


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Install]:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "site").mkdir()
    yield from installing(tmp_path / "site", monkeypatch)
    files._source.cache_clear()


@pytest.fixture(autouse=True)
def nothing_else(install: Install) -> None:
    """Every test begins and ends without plugins of files."""


def write(path: Path, source: str) -> Path:
    path.parent.mkdir(exist_ok=True)
    path.write_text(textwrap.dedent(source))
    files._source.cache_clear()
    return path


def whole(folder: Path, change: str = "") -> Path:
    """Write a file with a definition of nearly every kind, and its references in itself."""
    source = WHOLE.replace('"acme_reference:', 'f"{__name__}:')
    return write(folder / "acme.py", source + REFERENCE + change)


def resumable(folder: Path) -> Path:
    """Train two steps with the plugin in the file `acme.py`, and return the config."""
    whole(folder)
    (folder / "play.txt").write_text("to be or not to be, that is the question\n" * 64)
    data = [{"path": str(folder / "play.txt"), "type": "text"}]  # core's own type: a change of acme's changes the data
    config = write_config(folder, plugins=["./acme.py"], max_steps=2, save_steps=1, datasets=data)
    result = invoke("train", config)
    assert result.exit_code == 0, result.output
    return config


def invoke(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def refusal(path: Path) -> str:
    with pytest.raises(PluginError) as caught:
        load_registry(files=[str(path)])
    return str(caught.value)


# ------------------------------------------------------------------------------------------------------------- loading


def test_the_variable_and_the_config_name_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    one, two = write(tmp_path / "one.py", SPY), write(tmp_path / "two.py", SPY.replace('"spy"', '"other"'))
    monkeypatch.chdir(tmp_path)
    registry = load_registry({"SUROGATE_PLUGINS": f"./one.py{os.pathsep}-wandb"}, files=[str(two), str(one)])
    assert {"spy", "other"} <= set(registry.names("logger"))
    assert "wandb" not in registry.names("logger")
    plugin = outcome(registry, "one")
    assert (plugin.distribution, plugin.file, len(plugin.version)) == ("one.py", str(one), 12)


def test_a_path_is_relative_to_the_folder_of_the_yaml_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "configs/spy.py", SPY)
    write(tmp_path / "here/spy2.py", SPY.replace('"spy"', '"spy2"'))
    config = write(tmp_path / "configs/run.yaml", "model: m\nplugins: spy.py\nreport_to: spy\n")
    monkeypatch.chdir(tmp_path / "here")
    loaded = run.load(config)
    assert loaded.config.plugins == (str(tmp_path / "configs/spy.py"),)
    loaded = run.load(config, ["plugins=[spy2.py]", "report_to=spy2"])
    assert loaded.config.plugins == (str(tmp_path / "here/spy2.py"),)
    monkeypatch.setenv("SPIES", str(tmp_path / "configs"))
    assert run.load(write(tmp_path / "b.yaml", "model: m\nplugins: [$SPIES/spy.py]\n")).config.plugins == (
        str(tmp_path / "configs/spy.py"),
    )


def test_the_resolved_config_names_the_same_files(tmp_path: Path) -> None:
    spy = write(tmp_path / "a$b/spy.py", SPY)
    config = write(tmp_path / "a$b/run.yaml", "model: m\nplugins: [./spy.py]\nreport_to: [spy]\n")
    loaded = run.load(config)
    assert loaded.config.plugins == (str(spy),)
    again = load_config(resolved(loaded), registry=load_registry(files=plugin_files(resolved(loaded))), source="again")
    assert again == loaded


def test_the_version_is_a_hash_of_the_content(tmp_path: Path) -> None:
    first = outcome(load_registry(files=[str(write(tmp_path / "a/spy.py", SPY))]), "spy")
    same = outcome(load_registry(files=[str(write(tmp_path / "b/spy.py", SPY))]), "spy")
    other = outcome(load_registry(files=[str(write(tmp_path / "c/spy.py", SPY + "\n"))]), "spy")
    assert first.version == same.version != other.version


def test_a_file_is_switched_off_like_an_installed_plugin(tmp_path: Path) -> None:
    spy = write(tmp_path / "spy.py", SPY)
    for word in ("spy", "spy.py"):
        registry = load_registry({"SUROGATE_PLUGINS": f"-{word}"}, files=[str(spy)])
        assert outcome(registry, "spy").state is State.BLOCKED
        assert "spy" not in registry.names("logger")


# -------------------------------------------------------------------------------------------------------------- errors


def test_a_file_that_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    assert refusal(tmp_path / "none.py").startswith(f"{tmp_path}/none.py: no such file")
    assert "is a folder" in refusal(tmp_path)
    assert "is not a file *.py" in refusal(write(tmp_path / "spy.txt", SPY))


def test_an_error_at_the_import_of_a_file_names_its_line(tmp_path: Path) -> None:
    path = write(tmp_path / "spy.py", "x = 1\ndef f(:\n")
    assert refusal(path).startswith(f"{path}: import failed: SyntaxError") and f"({path}:2)" in refusal(path)
    path = write(tmp_path / "spy2.py", "import json\n\njson.loads('{')\n")
    assert f"({path}:3)" in refusal(path)


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("SUROGATE_API = {}\n", "has no hook; a hook is such as surogate_ops = provides([...])"),
        (SPY.replace(API, ""), f"declares no SUROGATE_API, not a number for each hook. Write {API}, and see docs/"),
        (SPY.replace(API, "SUROGATE_API = 7"), f"has SUROGATE_API = 7, not a number for each hook. Write {API}, and"),
        (SPY.replace(": 1}", ": 7}"), "is written for version 7 of surogate_loggers, surogate-core 0.2.0 serves 1."),
        (SPY.replace("surogate_loggers", "surogate_logger"), "did you mean surogate_loggers?"),
        (SPY.replace('summary=""', "summary=1"), "LoggerDef.summary is 1, expected text"),
    ],
)
def test_a_file_that_is_no_plugin_is_an_error(tmp_path: Path, source: str, expected: str) -> None:
    path = write(tmp_path / "spy.py", source)
    assert refusal(path).startswith(f"{path}: ") and expected in refusal(path)


def test_a_reference_to_the_name_of_the_file_says_how_to_write_it(tmp_path: Path) -> None:
    path = write(
        tmp_path / "acme.py",
        """
        from surogate_core.api import OpDef, provides
        SUROGATE_API = {"ops": 1}
        OP = OpDef(kind="acme_op", infer=lambda ins, attrs: [], reference="acme:acme_op")
        def acme_op(x):
            return x
        surogate_ops = provides([OP])
        """,
    )
    assert 'there is no module acme; a function of the same file is f"{__name__}:acme_op"' in refusal(path)


def test_a_file_with_the_name_of_an_installed_plugin_is_refused(tmp_path: Path, install: Install) -> None:
    install("acme-spies", "1.0", "spy", SPY.replace('"spy"', '"another"'))
    path = write(tmp_path / "spy.py", SPY)
    assert refusal(path) == f"{path}: acme-spies 1.0 also has a plugin 'spy'; rename the file"


def test_a_definition_that_is_also_installed_is_refused_when_it_is_used(tmp_path: Path, install: Install) -> None:
    install("acme-spies", "1.0", "spies", SPY)
    registry = load_registry(files=[str(write(tmp_path / "mine.py", SPY))])
    with pytest.raises(PluginError, match=r"logger 'spy' is provided by mine\.py .* and acme-spies 1\.0; uninstall"):
        registry.source("logger", "spy")


def test_a_wrong_value_of_the_key_is_reported_with_the_other_problems(tmp_path: Path) -> None:
    config = write(tmp_path / "run.yaml", "model: m\nplugins: {a: b}\nsequence_len: x\n")
    with pytest.raises(ConfigError, match=r"(?s)plugins: must be a name or a list of names.*sequence_len"):
        run.load(config)


@pytest.mark.parametrize("command", ["train", "plan", "tokenize", "verify", "profile"])
def test_every_command_that_reads_a_config_refuses_a_missing_file(tmp_path: Path, command: str) -> None:
    config = write(tmp_path / "run.yaml", "model: m\nplugins: [./none.py]\n")
    result = invoke(command, config)
    assert (result.exit_code, result.stderr) == (
        2,
        f"error: {tmp_path}/none.py: no such file; a plugin without a package is one Python file\n",
    )


# ---------------------------------------------------------------------------------------------------------------- runs


def test_surogate_plugins_lists_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spy = write(tmp_path / "spy.py", SPY)
    config = write(tmp_path / "run.yaml", "model: m\nplugins: [./spy.py]\n")
    found = [
        plugin
        for plugin in json.loads(invoke("plugins", "--config", config, "--json").stdout)["plugins"]
        if plugin["file"]
    ]
    assert [(plugin["file"], plugin["provides"]) for plugin in found] == [(str(spy), {"logger": ["spy"]})]
    monkeypatch.setenv("SUROGATE_PLUGINS", str(spy))
    assert f"{found[0]['distribution']}" in invoke("plugins").stdout


def test_a_model_an_op_and_an_optimizer_train_from_one_file(tmp_path: Path) -> None:
    resumable(tmp_path)
    version = outcome(load_registry(files=[str(tmp_path / "acme.py")]), "acme").version
    assert f"# acme.py {version}\n" in (tmp_path / "out/run.yaml").read_text()
    assert yaml.safe_load((tmp_path / "out/run.yaml").read_text())["plugins"] == [str(tmp_path / "acme.py")]
    manifest = json.loads((tmp_path / "out/step_00000002/manifest.json").read_text())
    assert manifest["versions"]["acme.py"] == version


def test_a_resumed_run_tells_that_a_file_has_changed(tmp_path: Path) -> None:
    config = resumable(tmp_path)
    more = ("--set", "resume_from_checkpoint=1")
    first = load_registry(files=[str(tmp_path / "acme.py")])
    whole(tmp_path, "\n# changed\n")
    discovery._survey.cache_clear()
    result = invoke("train", config, *more)
    second = load_registry(files=[str(tmp_path / "acme.py")])
    old, new = (outcome(registry, "acme").version for registry in (first, second))
    assert old != new
    assert f"resuming with acme.py {new} (saved: {old}): not bit-identical" in result.output


def test_a_file_that_has_only_moved_is_no_difference(tmp_path: Path) -> None:
    config = resumable(tmp_path)
    (tmp_path / "moved").mkdir()
    (tmp_path / "acme.py").rename(tmp_path / "moved/acme.py")
    settings = (f"plugins=[{tmp_path}/moved/acme.py]", "resume_from_checkpoint=1")
    result = invoke("train", config, *(word for setting in settings for word in ("--set", setting)))
    assert result.exit_code == 0 and "not bit-identical" not in result.output, result.output


def test_processes_compare_the_content_of_a_file_and_not_its_place(tmp_path: Path) -> None:
    compared = []
    for folder, change in (("a", ""), ("b", ""), ("c", "# changed\n")):
        (tmp_path / folder).mkdir()
        whole(tmp_path / folder, change)
        opened = run.open_run(run.load(write_config(tmp_path, plugins=[f"./{folder}/acme.py"])))
        compared.append(_compared(opened, run.plan(opened, "cpu")))
    assert compared[0] == compared[1]
    assert {key for key in compared[0] if compared[0][key] != compared[2][key]} == {"acme.py"}


def test_a_process_that_a_launcher_starts_loads_the_files(tmp_path: Path) -> None:
    write(tmp_path / "spy.py", SPY)
    config = write(tmp_path / "run.yaml", "model: m\nplugins: [./spy.py]\nreport_to: spy\n")
    loaded = run.load(config)
    with pytest.raises(ConfigError, match="datasets: is required to train"):  # so its keys were accepted
        task_of(loaded).work(None)  # type: ignore[arg-type]
