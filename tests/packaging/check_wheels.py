"""The wheels as users get them: each test installs some of them into a new environment.

`make test-wheels` runs this file after `make wheels`. `make test` does not, because it needs pip, an index and some
minutes.

Environments are made from `dist/*.whl` only and do not see the checkout. To install torch once instead of four times,
pip installs the dependencies of `surogate-core` into one environment from the metadata of the core wheel, and
uninstalls core; on top of it, in the same way, those of `surogate`. Every other environment is layered on one of these.
pip resolves each installation against it, so a missing or incompatible requirement fails here as it would for a user.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import zipfile
from pathlib import Path

import numpy as np
import program_run
import pytest
import virtualenvs
from filelock import FileLock
from virtualenvs import Environment

from surogate_core import __version__
from surogate_new.package import LAYERS

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
PACKAGES = {
    "surogate-build": ROOT / "surogate_build/src/surogate_build",
    "surogate-core": ROOT / "surogate_core/src/surogate_core",
    "surogate-models": ROOT / "surogate_models/src/surogate_models",
    "surogate-models-mistral": ROOT / "plugins/surogate_models_mistral/src/surogate_models_mistral",
    "surogate-models-gemma": ROOT / "plugins/surogate_models_gemma/src/surogate_models_gemma",
    "surogate-models-phi": ROOT / "plugins/surogate_models_phi/src/surogate_models_phi",
    "surogate-models-olmo": ROOT / "plugins/surogate_models_olmo/src/surogate_models_olmo",
    "surogate-models-moe": ROOT / "plugins/surogate_models_moe/src/surogate_models_moe",
    "surogate-models-hybrid": ROOT / "plugins/surogate_models_hybrid/src/surogate_models_hybrid",
    "surogate-models-gptoss": ROOT / "plugins/surogate_models_gptoss/src/surogate_models_gptoss",
    "surogate-models-mla": ROOT / "plugins/surogate_models_mla/src/surogate_models_mla",
    "surogate-models-muse": ROOT / "plugins/surogate_models_muse/src/surogate_models_muse",
    "surogate-recipe-bf16": ROOT / "surogate_recipes_bf16/src/surogate_recipes_bf16",
    "surogate-recipe-fp8": ROOT / "surogate_recipes_fp8/src/surogate_recipes_fp8",
    "surogate-recipe-nvfp4": ROOT / "surogate_recipes_nvfp4/src/surogate_recipes_nvfp4",
    "surogate-optim-adamw": ROOT / "plugins/surogate_optim_adamw/src/surogate_optim_adamw",
    "surogate-optim-adamw-8bit": ROOT / "plugins/surogate_optim_adamw_8bit/src/surogate_optim_adamw_8bit",
    "surogate-optim-normuon": ROOT / "plugins/surogate_optim_normuon/src/surogate_optim_normuon",
    "surogate-lora": ROOT / "plugins/surogate_lora/src/surogate_lora",
    "surogate-adapter-dora": ROOT / "plugins/surogate_dora/src/surogate_dora",
    "surogate-qlora-nf4": ROOT / "plugins/surogate_qlora_nf4/src/surogate_qlora_nf4",
    "surogate-qlora-fp8": ROOT / "plugins/surogate_qlora_fp8/src/surogate_qlora_fp8",
    "surogate-qlora-fp4": ROOT / "plugins/surogate_qlora_fp4/src/surogate_qlora_fp4",
    "surogate-qlora-mxfp4": ROOT / "plugins/surogate_qlora_mxfp4/src/surogate_qlora_mxfp4",
    "surogate-log-tensorboard": ROOT / "plugins/surogate_log_tensorboard/src/surogate_log_tensorboard",
    "surogate-log-wandb": ROOT / "plugins/surogate_log_wandb/src/surogate_log_wandb",
    "surogate-log-mlflow": ROOT / "plugins/surogate_log_mlflow/src/surogate_log_mlflow",
    "surogate-launch-env": ROOT / "plugins/surogate_launch_env/src/surogate_launch_env",
    "surogate-loss-distillation": ROOT / "plugins/surogate_loss_distillation/src/surogate_loss_distillation",
    "surogate-loss-preference": ROOT / "plugins/surogate_loss_preference/src/surogate_loss_preference",
    "surogate-loss-tokens": ROOT / "plugins/surogate_loss_tokens/src/surogate_loss_tokens",
    "surogate-launch-ray": ROOT / "plugins/surogate_launch_ray/src/surogate_launch_ray",
    "surogate-new": ROOT / "plugins/surogate_new/src/surogate_new",
    "surogate-offload-residual": ROOT / "plugins/surogate_offload_residual/src/surogate_offload_residual",
    "surogate-export-gguf": ROOT / "plugins/surogate_export_gguf/src/surogate_export_gguf",
    "surogate-offload-states": ROOT / "plugins/surogate_offload_states/src/surogate_offload_states",
    "surogate": ROOT / "src/surogate",
    "surogate-convert": ROOT / "plugins/surogate_convert/src/surogate_convert",
    "surogate-docs": ROOT / "plugins/surogate_docs/src/surogate_docs",
    "surogate-watch": ROOT / "plugins/surogate_watch/src/surogate_watch",
    "surogate-profile": ROOT / "plugins/surogate_profile/src/surogate_profile",
    "surogate-verify": ROOT / "plugins/surogate_verify/src/surogate_verify",
    "surogate-serving": ROOT / "plugins/surogate_serving/src/surogate_serving",
    "surogate-conformance": ROOT / "plugins/surogate_conformance/src/surogate_conformance",
}
KINDS = sorted(LAYERS)
EXAMPLE = ROOT / "plugins/example_third_party"

TINY = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 256,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
}
RUN = """
model: ./tiny
from_scratch: true
sequence_len: 32
per_device_train_batch_size: 2
model_dtype: fp32
datasets:
  - {path: ./text.txt, type: text}
"""


@pytest.fixture(scope="session")
def constrain(request: pytest.FixtureRequest) -> list[str]:
    """`--constraint FILE` if the Makefile asks for the tested versions."""
    return shlex.split(request.config.getoption("--constraint"))


def _requirements(name: str, root: Path, on_top_of: Path | None, constrain: list[str]) -> Path:
    """Return site-packages with what a wheel requires and no package of ours."""
    environment, whole = Environment(root), root / "whole"
    with FileLock(root.with_suffix(".lock")):
        if not whole.exists():
            virtualenvs.create(root, on_top_of=on_top_of)
            environment.pip("install", "--quiet", "--no-compile", *constrain, "--find-links", DIST, name)
            listed = json.loads(environment.pip("list", "--format", "json").stdout)
            ours = [found["name"] for found in listed if found["name"].startswith("surogate")]
            environment.pip("uninstall", "--quiet", "--yes", *ours)
            whole.touch()
    return environment.site_packages


def _shared(factory: pytest.TempPathFactory, name: str) -> Path:
    """Return a folder that all processes of pytest use."""
    own = factory.getbasetemp()
    return (own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / name


@pytest.fixture(scope="session")
def of_core(tmp_path_factory: pytest.TempPathFactory, constrain: list[str]) -> Path:
    return _requirements("surogate-core", _shared(tmp_path_factory, "of_core"), None, constrain)


@pytest.fixture(scope="session")
def dependencies(tmp_path_factory: pytest.TempPathFactory, constrain: list[str], of_core: Path) -> Path:
    return _requirements("surogate", _shared(tmp_path_factory, "dependencies"), of_core, constrain)


class Case:
    """An environment for some of the wheels, and a tiny run to plan."""

    def __init__(self, root: Path, dependencies: Path, constrain: list[str]) -> None:
        self.environment: Environment = virtualenvs.create(root / "venv", on_top_of=dependencies)
        self.constrain = constrain
        self.work = root / "work"
        (self.work / "tiny").mkdir(parents=True)
        (self.work / "tiny/config.json").write_text(json.dumps(TINY))
        (self.work / "text.txt").write_text("To be, or not to be, that is the question.\n" * 40)
        (self.work / "run.yaml").write_text(RUN)

    def install(self, *names: str | Path) -> None:
        self.environment.pip("install", "--quiet", *self.constrain, "--find-links", DIST, *names)
        self.environment.pip("check")

    def install_with_program(self, *names: str | Path) -> None:
        """Install packages, and the program without those that it requires, which `pip check` would miss."""
        self.environment.pip("install", "--quiet", *self.constrain, "--find-links", DIST, *names)
        self.environment.pip("install", "--quiet", "--no-deps", "--find-links", DIST, "surogate")

    def surogate(self, *args: str, code: int = 0) -> str:
        result = self.environment.run("surogate", *args, cwd=self.work, code=code)
        assert "Traceback" not in result.stderr
        return result.stdout if code == 0 else result.stderr

    def plugins(self) -> dict[str, str]:
        listed = json.loads(self.surogate("plugins", "--json"))
        return {plugin["name"]: plugin["state"] for plugin in listed["plugins"]}

    def has(self, module: str) -> bool:
        code = f"import importlib.util as u; raise SystemExit(u.find_spec({module!r}) is None)"
        try:
            self.environment.run("python", "-c", code)
        except AssertionError:
            return False
        return True


@pytest.fixture
def case(tmp_path: Path, dependencies: Path, constrain: list[str]) -> Case:
    return Case(tmp_path, dependencies, constrain)


def compiled(source: Path) -> set[str]:
    """Return the files that a build with SUROGATE_CUDA=on adds."""
    return {f"{source.name}/_C.abi3.so"}


def test_every_package_has_one_wheel_with_every_source_file() -> None:
    for name, source in PACKAGES.items():
        (wheel,) = DIST.glob(f"{name.replace('-', '_')}-*.whl")
        held = {file for file in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in file}
        expected = {
            path.relative_to(source.parent).as_posix()
            for path in source.rglob("*")
            if path.is_file() and "__pycache__" not in path.parts
        }
        if name == "surogate-docs":
            pages = [ROOT / "docs/llms.txt", *ROOT.glob("docs/**/*.md")]
            expected |= {f"surogate_docs/docs/{path.relative_to(ROOT / 'docs')}" for path in pages}
        assert held - compiled(source) == expected - compiled(source), name
        assert (wheel.name.endswith("-py3-none-any.whl")) == held.isdisjoint(compiled(source)), name
        assert f"{source.name}/py.typed" in held


def test_a_package_with_kernels_is_built_without_torch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An isolated build: pip prints what it installs for it."""
    environment = virtualenvs.create(tmp_path / "venv")
    package = tmp_path / "package"
    shutil.copytree(PACKAGES["surogate-optim-adamw"].parents[1], package, ignore=shutil.ignore_patterns("build"))
    monkeypatch.setenv("SUROGATE_CUDA", "off")
    monkeypatch.setenv("PIP_FIND_LINKS", str(DIST))
    told = environment.pip("wheel", "--verbose", "--no-deps", "--wheel-dir", tmp_path / "built", package)
    lines = re.findall("Successfully installed (.*)", told.stdout + told.stderr)
    installed = {name.rsplit("-", 1)[0] for line in lines for name in line.split()}
    assert {"surogate-build", "scikit-build-core", "nanobind"} <= installed
    assert installed.isdisjoint({"torch", "surogate-core"})
    assert [path.name for path in (tmp_path / "built").iterdir()] == ["surogate_optim_adamw-0.2.0-py3-none-any.whl"]


def test_the_meta_package_installs_all_packages(case: Case) -> None:
    case.install("surogate")
    assert case.plugins() == dict.fromkeys(
        (
            "builtin",
            "adamw",
            "adamw_8bit",
            "bf16",
            "env",
            "fp8",
            "lora",
            "loss_distillation",
            "loss_preference",
            "loss_tokens",
            "models",
            "normuon",
            "nvfp4",
            "offload_residual",
            "offload_states",
            "qlora_fp4",
            "qlora_fp8",
            "qlora_mxfp4",
            "qlora_nf4",
            "surogate",
        ),
        "loaded",
    )
    assert case.has("datasets")
    assert case.surogate("--version").startswith(f"surogate {__version__}")
    assert json.loads(case.surogate("plan", "run.yaml", "--json"))["fits"] is True
    assert "Traceback" not in case.surogate("doctor")


def test_the_dockerfile_copies_builds_and_installs_what_there_is(case: Case) -> None:
    """All that can be said without Docker: its files and its target of make exist, and pip resolves its packages."""
    text = (ROOT / "Dockerfile").read_text().replace("\\\n", " ")
    instructions = [line.split(" ", 1) for line in text.splitlines() if line and not line.startswith("#")]
    assert {name for name, _ in instructions} <= {"FROM", "ARG", "RUN", "COPY", "WORKDIR", "ENTRYPOINT"}
    copied = [rest.split()[0] for name, rest in instructions if name == "COPY" and not rest.startswith("--from")]
    assert copied == [".", "constraints/cpu.txt"] and (ROOT / copied[1]).is_file()
    (targets,) = re.findall(r"make -C /source (.+)", text)
    assert set(targets.split()) <= set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    ignored = (ROOT / ".dockerignore").read_text().splitlines()
    assert {f"**/{line}" for line in (ROOT / ".gitignore").read_text().splitlines()} <= set(ignored)

    (install,) = re.findall(r"RUN pip (install .+)", text)
    arguments = shlex.split(install.replace("/wheels/constraints.txt", str(ROOT / "constraints/cpu.txt")))
    told = case.environment.pip(*(str(DIST) if word == "/wheels" else word for word in arguments), "--dry-run")
    (line,) = re.findall("Would install (.*)", told.stdout)
    assert {"surogate-0.2.0", "surogate-adapter-dora-0.2.0", "surogate-log-wandb-0.2.0"} <= set(line.split())


def test_core_and_the_first_packages_need_four_others_and_train_as_the_program_does(
    tmp_path: Path, of_core: Path, constrain: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Losses and weights are equal to the bit to those of `surogate pt`, which runs here, on the same tokens."""
    case = Case(tmp_path, of_core, constrain)
    case.install("surogate-models", "surogate-recipe-bf16", "surogate-optim-adamw")
    assert not any(map(case.has, ("surogate", "transformers", "yaml", "typer", "rich")))
    code = (
        "from surogate_core.plugins.discovery import load_registry; print(*(p.name for p in load_registry().plugins))"
    )
    assert case.environment.run("python", "-c", code).stdout.split() == ["builtin", "adamw", "bf16", "models"]
    for module in ("surogate_core", "surogate_core.cli"):
        assert "pip install surogate" in case.environment.run("python", "-m", module, code=1).stderr
    losses, weights = program_run.train(tmp_path, monkeypatch)
    given = ROOT / "tests/saved_batches.py", tmp_path, program_run.ROW_LENGTH, program_run.LEARNING_RATE
    assert json.loads(case.environment.run("python", *map(str, given)).stdout) == losses
    with np.load(tmp_path / "trained.npz") as trained:
        assert trained.keys() == weights.keys()
        assert all(np.array_equal(trained[name], weights[name]) for name in weights)


def test_without_the_recipe_the_error_names_the_package_to_install(case: Case) -> None:
    case.install_with_program("surogate-core", "surogate-models", "surogate-optim-adamw-8bit")
    assert "bf16" not in case.plugins()
    message = case.surogate("plan", "run.yaml", code=2)
    assert "no installed plugin provides it. Installed: none. Try: pip install surogate-recipe-bf16" in message
    case.install_with_program("surogate-recipe-bf16")
    case.surogate("plan", "run.yaml")
    case.environment.pip("uninstall", "--quiet", "--yes", "surogate-recipe-bf16")
    assert "pip install surogate-recipe-bf16" in case.surogate("plan", "run.yaml", code=2)


def test_without_the_default_optimizer_the_error_names_its_package_and_an_installed_one(case: Case) -> None:
    case.install_with_program("surogate-core", "surogate-models", "surogate-optim-adamw", "surogate-recipe-bf16")
    message = case.surogate("plan", "run.yaml", code=2)
    assert "Try: pip install surogate-optim-adamw-8bit, or optimizer: adamw" in message
    case.surogate("plan", "run.yaml", "--set", "optimizer=adamw")


@pytest.mark.parametrize(
    ("recipe", "package"), [("fp8-hybrid", "surogate-recipe-fp8"), ("nvfp4", "surogate-recipe-nvfp4")]
)
def test_a_second_recipe_can_be_installed_and_uninstalled(case: Case, recipe: str, package: str) -> None:
    case.install_with_program("surogate-core", "surogate-models", "surogate-optim-adamw-8bit", "surogate-recipe-bf16")
    plan = ("plan", "run.yaml", "--set", f"recipe={recipe}", "--set", "model_dtype=bf16")
    assert f"Installed: bf16. Try: pip install {package}" in case.surogate(*plan, code=2)
    case.install_with_program(package)
    case.surogate(*plan)
    case.surogate("plan", "run.yaml")
    case.environment.pip("uninstall", "--quiet", "--yes", package)
    assert f"pip install {package}" in case.surogate(*plan, code=2)
    case.surogate("plan", "run.yaml")


def test_a_third_party_plugin_can_be_installed_and_uninstalled(case: Case, tmp_path: Path) -> None:
    case.install("surogate")
    case.environment.pip("wheel", "--quiet", "--no-deps", "--wheel-dir", tmp_path / "built", EXAMPLE)
    case.install(*(tmp_path / "built").glob("*.whl"))
    assert case.plugins()["acme"] == "loaded"
    case.surogate("plan", "run.yaml", "--set", "optimizer=acme_sgd")
    case.environment.pip("uninstall", "--quiet", "--yes", "acme-surogate-sgd")
    assert "acme" not in case.plugins()
    assert "acme_sgd" in case.surogate("plan", "run.yaml", "--set", "optimizer=acme_sgd", code=2)


def test_packages_of_surogate_new_are_built_and_installed_and_their_tests_train(
    case: Case, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All kinds in one environment. The one with a kernel is built as pip builds any package, the others together."""
    case.install("surogate-conformance", "surogate-loss-tokens", "hatchling", "pytest")
    for kind in KINDS:
        case.surogate("new", kind, f"acme-{kind}")
    build = ("wheel", "--quiet", "--no-deps", "--find-links", DIST, "--wheel-dir", tmp_path / "built")
    case.environment.pip(*build, "--no-build-isolation", *(case.work / f"acme-{k}" for k in KINDS if k != "kernel"))
    monkeypatch.setenv("SUROGATE_CUDA", "off")
    case.environment.pip(*build, case.work / "acme-kernel")
    case.install(*(tmp_path / "built").glob("*.whl"))
    assert {f"acme_{kind.replace('-', '_')}" for kind in KINDS} <= {
        n for n, state in case.plugins().items() if state == "loaded"
    }
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    tests = [f"acme-{kind}/tests" for kind in KINDS]
    case.environment.run("python", "-m", "pytest", "-q", "--import-mode=importlib", *tests, cwd=case.work)
    for command in ("plugins test acme-optimizer", "train example/run.yaml"):
        case.environment.run("surogate", *command.split(), cwd=case.work / "acme-optimizer")
