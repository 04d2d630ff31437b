"""`surogate new`: what it refuses, and packages of every kind. `make test-wheels` runs the tests of these."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from surogate import run
from surogate.cli.app import app
from surogate_core.api import ConfigError, PluginError
from surogate_core.plugins import discovery
from surogate_core.plugins.hookspecs import HOOKS
from surogate_new.package import LAYERS, TEMPLATES, Package, write

KINDS = sorted(LAYERS)
SHOWN = {
    "adapter",
    "checkpoint-form",
    "dataset",
    "export-format",
    "kernel",
    "launcher",
    "logger",
    "loss",
    "offload",
    "recipe",
    "weight-format",
}
"""Kinds with a page of their own in the documentation: their commands run in `make docs-test`."""


def new(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["new", *map(str, arguments)])


def install(package: Package, folder: Path, site: Path) -> None:
    """Make a package of pure Python importable with its entry points, as an installation does, without pip."""
    described = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    info = site / f"{package.module}-{described['version']}.dist-info"
    info.mkdir(parents=True)
    required = "".join(f"Requires-Dist: {line}\n" for line in described["dependencies"])
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package.distribution}\nVersion: 0.1.0\n{required}")
    ((name, module),) = described["entry-points"]["surogate"].items()
    (info / "entry_points.txt").write_text(f"[surogate]\n{name} = {module}\n")
    (site / package.module).symlink_to(folder / "src" / package.module)


# --------------------------------------------------------------------------------------------------------- every kind


def test_there_is_a_kind_for_every_hook() -> None:
    assert {"dataset" if kind == "format" else kind.replace(" ", "-") for kind in HOOKS.values()} == set(KINDS)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind not in SHOWN])
def test_the_commands_of_a_readme_run(kind: str, tmp_path: Path) -> None:
    """All but the installation, of which the documentation of plugins has a test. `surogate plugins test` is one."""
    package, folder = Package(kind, f"acme-{kind}"), tmp_path / "package"
    write(package, folder)
    install(package, folder, tmp_path / "site")
    commands = (folder / "README.md").read_text().split("```bash\n")[1].split("```")[0].splitlines()
    assert commands[0] == "pip install --editable '.[test]'" and f"surogate plugins test acme-{kind}" in commands
    assert len([line for line in commands if line.startswith("surogate train example/")]) == len(
        list(folder.glob("example/*.yaml"))
    )
    environment = {
        **os.environ,
        "PATH": f"{Path(sys.prefix) / 'bin'}:{os.environ['PATH']}",
        "PYTHONPATH": str(tmp_path / "site"),
        "SUROGATE_PLUGINS": "",
        "XDG_CACHE_HOME": str(tmp_path / "cache"),
    }
    for line in commands[1:]:
        done = subprocess.run(
            line, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, f"{line}\n{done.stdout[-4000:]}{done.stderr[-2000:]}"
    line = "surogate plan example/run.yaml --device h200 --json"
    done = subprocess.run(line, shell=True, cwd=folder, env=environment, capture_output=True, text=True, check=True)
    assert (
        not json.loads(done.stdout)["refusals"]
        or "kernels: allow_reference" in (folder / "example/run.yaml").read_text()
    ), "a GPU would refuse the example"


@pytest.mark.slow
def test_an_adapter_in_one_file_trains_and_is_merged_without_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(Package("adapter", "acme-adapter"), tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    run.train(run.load("example/base.yaml", ["verify_outputs=false", "max_steps=1"]))
    file = "plugins=src/acme_adapter/plugin.py"
    run.train(run.load("example/run.yaml", [file, "max_steps=2"]))  # the check of the output loads the file too
    assert run.merge("output/run/adapter", "merged", config="output/run/run.yaml") == Path("output/base")
    discovery._survey.cache_clear()
    with pytest.raises(ConfigError, match=r"no installed adapter reads it.*--config output/run/run\.yaml"):
        run.merge("output/run/adapter", "again")
    (tmp_path / "src/acme_adapter/plugin.py").unlink()
    discovery._survey.cache_clear()
    with pytest.raises(PluginError, match=r"plugin\.py: no such file"):
        run.merge("output/run/adapter", "again", config="output/run/run.yaml")


@pytest.mark.parametrize("kind", KINDS)
def test_a_package_imports_only_what_is_open_to_authors(kind: str, tmp_path: Path) -> None:
    for path in write(Package(kind, "acme-x"), tmp_path):
        if path.suffix == ".py":
            modules = [
                node.module for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.ImportFrom)
            ]
            core = {module for module in modules if module and module.startswith("surogate_core")}
            opened = ("surogate_core.api", "surogate_core.reference", "surogate_core.testing")
            tests = ("surogate_core",) if "tests" in path.parts else ()  # `run`, the Python API
            assert all(module.startswith(opened) or module in tests for module in core), path


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_of_the_template_s_names_is_left_and_every_file_is_well_formed(kind: str, tmp_path: Path) -> None:
    written = write(Package(kind, "surogate-optim-lion"), tmp_path / "lion")
    for path in written:
        text = path.read_text()
        assert "acme" not in text.lower() and "acme" not in str(path.relative_to(tmp_path)), path
        if path.suffix == ".py":
            compile(text, path, "exec")
    described = tomllib.loads((tmp_path / "lion/pyproject.toml").read_text())["project"]
    assert described["name"] == "surogate-optim-lion"
    assert described["entry-points"]["surogate"] == {"optim_lion": "surogate_optim_lion.plugin"}
    assert described["dependencies"][0] == "surogate-core>=0.2,<0.3"
    assert described["description"] in (tmp_path / "lion/README.md").read_text()


def test_a_definition_is_called_as_its_package_without_what_all_such_packages_begin_with() -> None:
    names = {name: Package("optimizer", name).name for name in ("acme-lion", "surogate-optim-lion", "surogate-lion")}
    assert names == {"acme-lion": "acme_lion", "surogate-optim-lion": "lion", "surogate-lion": "lion"}


def test_every_template_is_used() -> None:
    assert {path.name for path in TEMPLATES.iterdir()} == {layer for layers in LAYERS.values() for layer in layers}


# ------------------------------------------------------------------------------------------------------------ refusals


def test_the_command_says_what_it_wrote(tmp_path: Path) -> None:
    result = new("logger", tmp_path / "acme-spy")
    assert result.exit_code == 0 and "package acme-spy" in result.stdout
    assert (tmp_path / "acme-spy/src/acme_spy/plugin.py").is_file()
    told = json.loads(new("logger", tmp_path / "elsewhere", "--name", "acme-other", "--json").stdout)
    assert told["package"] == "acme-other" and "src/acme_other/plugin.py" in told["files"]
    assert (tmp_path / "elsewhere/src/acme_other/plugin.py").is_file()


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("optimiser", "did you mean optimizer?"), ("verb", "kinds: adapter, checkpoint-form, dataset")],
)
def test_an_unknown_kind_names_the_nearest(kind: str, expected: str, tmp_path: Path) -> None:
    result = new(kind, tmp_path / "acme-x")
    assert result.exit_code == 2 and f"{kind}: is no kind of plugin; {expected}" in result.stderr
    assert not (tmp_path / "acme-x").exists()


@pytest.mark.parametrize(
    "name", ["Acme", "acme spy", "2acme", "acme--spy", "acme/spy", "surogate-optim-", "acme_spy", "lambda"]
)
def test_a_name_that_no_package_can_have_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no name for a package"):
        write(Package("logger", name), tmp_path / "x")


def test_a_name_that_is_taken_is_refused(tmp_path: Path) -> None:
    for name in ("torch", "surogate-lora"):
        with pytest.raises(ConfigError, match="is installed already"):
            write(Package("logger", name), tmp_path / "x")


def test_a_folder_that_is_not_empty_is_refused_and_left_as_it_is(tmp_path: Path) -> None:
    (tmp_path / "mine").mkdir()
    assert new("logger", tmp_path / "mine", "--name", "acme-spy").exit_code == 0
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    for target in (tmp_path / "mine", tmp_path / "mine/README.md"):
        result = new("op", target, "--name", "acme-op")
        assert result.exit_code == 2 and "is not an empty folder" in result.stderr
    result = new("op", tmp_path / "mine/README.md/acme-op")
    assert result.exit_code == 2 and result.stderr.endswith("cannot be written: Not a directory.\n")
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before
