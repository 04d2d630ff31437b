"""The compiled modules in the wheels: which GPUs they serve, which Pythons, and what importing them takes.

Run by `make test-wheels` after `make wheels`. Wheels without kernels are skipped, unless SUROGATE_CUDA=on asked for
kernels: then they are missing.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from pathlib import Path

import pytest
import virtualenvs
from virtualenvs import Environment

ROOT = Path(__file__).parents[2]
DIST = ROOT / "dist"
FOLDERS = sorted(path.parent for path in [*ROOT.glob("*/CMakeLists.txt"), *ROOT.glob("plugins/*/CMakeLists.txt")])
NAMES = [folder.name for folder in FOLDERS]
# What README and docs/building.md promise, in CMake's notation: `real` is SASS, `virtual` is PTX.
PROMISED = {"80-real", "86-real", "89-real", "90a-real", "100f-real", "120f-real", "90-virtual", "120-virtual"}
TARGETS = set(os.environ["CUDAARCHS"].split(";")) if "CUDAARCHS" in os.environ else PROMISED
CUOBJDUMP = virtualenvs.current_site_packages() / "nvidia/cu13/bin/cuobjdump"
OF_THE_SYSTEM = {
    "ld-linux-x86-64.so.2",
    "libc.so.6",
    "libdl.so.2",
    "libgcc_s.so.1",
    "libm.so.6",
    "libpthread.so.0",
    "librt.so.1",
    "libstdc++.so.6",
}
PYTHONS = [f"python3.{minor}" for minor in range(11, 15)]


def wheel_of(folder: Path) -> Path:
    name = tomllib.loads((folder / "pyproject.toml").read_text())["project"]["name"].replace("-", "_")
    (wheel,) = DIST.glob(f"{name}-*.whl")
    asked = os.environ.get("SUROGATE_CUDA", "auto").lower()
    if wheel.name.endswith("-py3-none-any.whl") and asked not in ("on", "1"):
        pytest.skip("the wheels were built without kernels; with them: SUROGATE_CUDA=on make test-wheels")
    return wheel


@pytest.fixture(params=FOLDERS, ids=NAMES)
def folder(request: pytest.FixtureRequest) -> Path:
    return request.param


@pytest.fixture
def module(folder: Path, tmp_path: Path) -> Path:
    """`_C` of a package, out of its wheel."""
    with zipfile.ZipFile(wheel_of(folder)) as wheel:
        return Path(wheel.extract(f"{folder.name}/_C.abi3.so", tmp_path))


def test_a_wheel_holds_one_module_and_no_library_of_others(folder: Path) -> None:
    wheel = wheel_of(folder)
    assert "-cp311-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        binaries = [name for name in archive.namelist() if archive.read(name).startswith(b"\x7fELF")]
    assert binaries == [f"{folder.name}/_C.abi3.so"]


def targets(module: Path) -> Counter[str]:
    """The targets that a module holds code for, in CMake's notation, and how many of its files have it."""
    told = subprocess.run([CUOBJDUMP, module], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^Fatbin (elf|ptx) code:\n=+\narch = sm_(\w+)$", told, re.M)
    return Counter(f"{target}-{'real' if kind == 'elf' else 'virtual'}" for kind, target in found)


def test_every_kernel_is_compiled_for_every_target_that_is_promised(folder: Path, module: Path) -> None:
    sources = len(list(folder.glob("csrc/*.cu")))
    assert targets(module) == dict.fromkeys(TARGETS, sources)


def test_a_module_links_the_libraries_of_the_system_alone(module: Path) -> None:
    told = subprocess.run(["readelf", "--dynamic", "--wide", module], capture_output=True, text=True, check=True).stdout
    assert set(re.findall(r"\(NEEDED\).*\[(.+)\]", told)) <= OF_THE_SYSTEM
    assert "libc.so.6" in told
    assert not re.findall(r"\((RPATH|RUNPATH)\)", told)


IMPORT = """
import json, sys
from importlib import import_module
told = [import_module(f"{name}._C").build_info() for name in sys.argv[1:]]
files = {path.rpartition("/")[2] for path in open("/proc/self/maps").read().split() if ".so" in path}
print(json.dumps({"modules": told, "files": sorted(files)}))
"""


@pytest.fixture(scope="session")
def wheels() -> list[Path]:
    return [wheel_of(folder) for folder in FOLDERS]


@pytest.mark.parametrize("python", PYTHONS)
def test_modules_import_into_every_python_without_torch_driver_or_any_library_of_nvidia(
    python: str, wheels: list[Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    program = sys.executable if python == f"python3.{sys.version_info.minor}" else shutil.which(python)
    if program is None or subprocess.run([program, "--version"], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"no {python} here")
    subprocess.run([program, "-m", "venv", tmp_path / "venv"], check=True)
    environment = Environment(tmp_path / "venv")
    constrain = shlex.split(request.config.getoption("--constraint"))
    environment.pip("install", "--quiet", *constrain, "nanobind-backend")
    environment.pip("install", "--quiet", "--no-deps", *wheels)

    told = json.loads(environment.run("python", "-c", IMPORT, *NAMES).stdout)
    assert [module["package"] for module in told["modules"]] == NAMES
    assert all(set(module["architectures"]) == TARGETS for module in told["modules"])
    assert "_C.abi3.so" in told["files"]
    assert not [file for file in told["files"] if re.match(r"lib(c10|cu|nccl|nv|torch)", file)]
