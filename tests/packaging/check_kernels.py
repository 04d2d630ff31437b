"""The compiled modules in the wheels: which GPUs and Pythons they serve, and what they link.

`make test-wheels` runs this file after `make wheels`. Wheels without kernels are skipped, or fail with
SUROGATE_CUDA=on, which asks for kernels.
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
BUILD = ROOT / "surogate_build/src/surogate_build"
FOLDERS = sorted(path.parent for path in [*ROOT.glob("*/CMakeLists.txt"), *ROOT.glob("plugins/*/CMakeLists.txt")])
NAMES = [folder.name for folder in FOLDERS]
# The targets that docs/building.md lists, in CMake's notation: `real` is SASS, `virtual` is PTX.
DOCUMENTED = {"80-real", "86-real", "90-real", "100-real", "120-real", "90-virtual", "120-virtual"}
CUOBJDUMP = virtualenvs.current_site_packages() / "nvidia/cu13/bin/cuobjdump"
SYSTEM_LIBRARIES = {
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
    """The compiled module `_C` of a package, extracted from its wheel."""
    with zipfile.ZipFile(wheel_of(folder)) as wheel:
        return Path(wheel.extract(f"{folder.name}/_C.abi3.so", tmp_path))


def test_a_wheel_contains_one_module_and_no_other_library(folder: Path) -> None:
    wheel = wheel_of(folder)
    assert "-cp311-abi3-" in wheel.name
    with zipfile.ZipFile(wheel) as archive:
        binaries = [name for name in archive.namelist() if archive.read(name).startswith(b"\x7fELF")]
    assert binaries == [f"{folder.name}/_C.abi3.so"]


def test_kernels_are_compiled_by_the_ccache_of_the_environment(folder: Path) -> None:
    """`make install` installs it, and an environment that is not activated is not on PATH."""
    wheel_of(folder)
    (cache,) = folder.glob("build/cp311-abi3-*/CMakeCache.txt")
    found = re.search(r"^SUROGATE_CCACHE:FILEPATH=(.*)$", cache.read_text(), re.M)
    assert found and found[1] == str(Path(sys.executable).parent / "ccache")


def targets(module: Path) -> Counter[str]:
    """Return {target in CMake's notation: number of source files of the module that are compiled for it}."""
    output = subprocess.run([CUOBJDUMP, module], capture_output=True, text=True, check=True).stdout
    found = re.findall(r"^Fatbin (elf|ptx) code:\n=+\narch = sm_(\w+)$", output, re.M)
    return Counter(f"{target}-{'real' if kind == 'elf' else 'virtual'}" for kind, target in found)


def supported(folder: Path) -> set[str]:
    """Return the targets that the kernels of a package are compiled for: those from `OLDEST` on, and `ALSO`."""
    text = (folder / "CMakeLists.txt").read_text()
    oldest, also = re.search(r"OLDEST (\d+)", text), re.findall(r"ALSO (\d+)", text)
    default = {*DOCUMENTED, *(f"{number}-real" for number in also)}
    every = set(os.environ["CUDAARCHS"].split(";")) if "CUDAARCHS" in os.environ else default
    numbers = {target: int(re.match(r"\d+", target)[0]) for target in every}  # type: ignore[index]
    return {target for target, number in numbers.items() if number >= (int(oldest[1]) if oldest else 0)}


def shared(folder: Path) -> list[Path]:
    """Return the shared sources in CUDA that the module of a package is compiled from."""
    used = re.search(r"USES ([a-z_ ]+)", (folder / "CMakeLists.txt").read_text())
    return [source for part in (used[1].split() if used else ()) for source in BUILD.glob(f"csrc/{part}/*.cu")]


def test_every_kernel_is_compiled_for_every_documented_target(folder: Path, module: Path) -> None:
    """Those of csrc/sm<arch>/ are compiled for that architecture alone."""
    expected = Counter(dict.fromkeys(supported(folder), len([*folder.glob("csrc/*.cu"), *shared(folder)])))
    expected.update(f"{source.parent.name.removeprefix('sm')}-real" for source in folder.glob("csrc/sm*/*.cu"))
    assert targets(module) == expected


def test_a_module_links_system_libraries_only(module: Path) -> None:
    dynamic = subprocess.run(
        ["readelf", "--dynamic", "--wide", module], capture_output=True, text=True, check=True
    ).stdout
    assert set(re.findall(r"\(NEEDED\).*\[(.+)\]", dynamic)) <= SYSTEM_LIBRARIES
    assert "libc.so.6" in dynamic
    assert not re.findall(r"\((RPATH|RUNPATH)\)", dynamic)


IMPORT = """
import json, sys
from importlib import import_module
modules = [import_module(f"{name}._C").build_info() for name in sys.argv[1:]]
files = {path.rpartition("/")[2] for path in open("/proc/self/maps").read().split() if ".so" in path}
print(json.dumps({"modules": modules, "files": sorted(files)}))
"""


@pytest.fixture(scope="session")
def wheels() -> list[Path]:
    return [wheel_of(folder) for folder in FOLDERS] + list(DIST.glob("surogate_core-*.whl"))


@pytest.mark.parametrize("python", PYTHONS)
def test_modules_import_in_every_python_without_torch_driver_or_nvidia_libraries(
    python: str, wheels: list[Path], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    program = sys.executable if python == f"python3.{sys.version_info.minor}" else shutil.which(python)
    if program is None or subprocess.run([program, "--version"], capture_output=True, check=False).returncode != 0:
        pytest.skip(f"{python} is not installed")
    subprocess.run([program, "-m", "venv", tmp_path / "venv"], check=True)
    environment = Environment(tmp_path / "venv")
    constrain = shlex.split(request.config.getoption("--constraint"))
    environment.pip("install", "--quiet", *constrain, "nanobind-backend")
    environment.pip("install", "--quiet", "--no-deps", *wheels)

    imported = json.loads(environment.run("python", "-c", IMPORT, *NAMES).stdout)
    assert [module["package"] for module in imported["modules"]] == NAMES
    assert [set(module["architectures"]) for module in imported["modules"]] == [supported(folder) for folder in FOLDERS]
    assert "_C.abi3.so" in imported["files"]
    assert not [file for file in imported["files"] if re.match(r"lib(c10|cu|nccl|nv|torch)", file)]
