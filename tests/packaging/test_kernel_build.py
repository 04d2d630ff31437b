"""What packages with kernels share: the build backend, the sources and headers of surogate-build."""

from __future__ import annotations

import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
import textwrap
import tomllib
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import virtualenvs

from surogate_core.api.compiled import HEADERS
from surogate_core.dtypes import DTYPES
from surogate_core.reference.rounding import philox4x32, random_16_bits, round_stochastic

ROOT = Path(__file__).parents[2]
BUILD = ROOT / "surogate_build/src/surogate_build"
BACKEND = BUILD / "backend.py"
FOLDERS = sorted(path.parent for path in [*ROOT.glob("*/CMakeLists.txt"), *ROOT.glob("plugins/*/CMakeLists.txt")])
NVCC = shutil.which("nvcc")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_a_package_with_kernels_requires_nothing_but_surogate_build_to_be_built(folder: Path) -> None:
    expected = {"requires": ["surogate-build>=0.2,<0.3"], "build-backend": "surogate_build.backend"}
    assert tomllib.loads((folder / "pyproject.toml").read_text())["build-system"] == expected


def program(folder: Path, name: str, says: str) -> None:
    path = folder / name
    path.write_text(f"#!/bin/sh\necho '{says}'\n")
    path.chmod(0o755)


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, Any]]:
    """backend(asked, nvcc, gpu): import the build backend as on a machine with these and nothing else of NVIDIA."""
    pytest.importorskip("scikit_build_core")

    def load(asked: str | None = None, nvcc: bool = False, gpu: str = "") -> dict[str, Any]:
        if nvcc:
            program(tmp_path, "nvcc", "")
        program(tmp_path, "nvidia-smi", gpu or "No devices were found")
        for name in ("CUDACXX", "CUDA_PATH", "CUDAARCHS", "LIBRARY_PATH"):
            monkeypatch.setenv(name, "")  # registers it, so that changes by the backend are undone
            monkeypatch.delenv(name)
        monkeypatch.chdir(FOLDERS[0])  # as pip does
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.setenv("CUDA_HOME", str(tmp_path / "no-toolkit"))
        monkeypatch.setattr(sys, "path", [str(tmp_path / "site"), *sys.path])
        monkeypatch.setenv("SUROGATE_CUDA", asked or "")
        if asked is None:
            monkeypatch.delenv("SUROGATE_CUDA")
        return runpy.run_path(str(BACKEND))

    return load


@pytest.mark.parametrize(
    ("asked", "nvcc", "gpu", "decided"),
    [
        (None, True, True, "on"),
        ("auto", True, True, "on"),
        ("auto", True, False, "off"),
        ("auto", False, True, "off"),
        ("AUTO", False, False, "off"),
        ("", True, True, "on"),
        ("on", False, False, "on"),
        ("off", True, True, "off"),
    ],
)
def test_kernels_are_compiled_when_asked_or_when_nvcc_and_a_gpu_are_visible(
    asked: str | None, nvcc: bool, gpu: bool, decided: str, backend: Callable[..., dict[str, Any]]
) -> None:
    backend(asked, nvcc, "9.0" if gpu else "")
    assert os.environ["SUROGATE_CUDA"] == decided


@pytest.mark.parametrize(
    ("asked", "nvcc", "gpu", "wanted"),
    [
        (None, False, "9.0", True),
        ("on", False, "", True),
        (None, True, "9.0", False),
        (None, False, "", False),
        ("off", False, "9.0", False),
    ],
)
def test_nvcc_wheels_are_required_if_a_gpu_is_visible_and_no_toolkit_is_installed(
    asked: str | None, nvcc: bool, gpu: str, wanted: bool, backend: Callable[..., dict[str, Any]]
) -> None:
    loaded = backend(asked, nvcc, gpu)
    names = {requirement.partition("==")[0] for requirement in loaded["missing_wheels"]()}
    assert names == (set(loaded["NVCC_WHEELS"]) if wanted else set())
    required = loaded["get_requires_for_build_wheel"]()
    assert names <= {requirement.partition("==")[0] for requirement in required}


def test_nvcc_of_wheels_is_used_if_there_is_no_other(
    tmp_path: Path, backend: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "site/nvidia/cu13/bin"
    folder.mkdir(parents=True)
    program(folder, "nvcc", "")
    assert backend(None, False, "9.0")["missing_wheels"]() == []
    assert os.environ["CUDACXX"] == str(folder / "nvcc")
    assert os.environ["LIBRARY_PATH"] == str(tmp_path / "site/nvidia/cu13/lib")
    backend(None, True, "9.0")
    assert (os.environ["CUDACXX"], os.environ.get("LIBRARY_PATH")) == (str(tmp_path / "nvcc"), None)


@pytest.mark.parametrize(
    ("gpus", "compiled"),
    [
        ("9.0", "90-real"),
        ("8.6", "86-real"),
        ("8.0\n9.0", "80-real;90-real"),
        ("10.3", "103-real"),
        ("12.0\n12.1", "120-real;121-real"),
        ("7.5", ""),
    ],
)
def test_an_editable_install_compiles_for_the_gpus_that_are_visible(
    gpus: str, compiled: str, backend: Callable[..., dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    loaded = backend(None, True, gpus)
    monkeypatch.setattr(loaded["scikit_build"], "build_editable", lambda *settings: "built")
    assert loaded["build_editable"]("folder") == "built"
    assert os.environ.get("CUDAARCHS", "") == compiled


OUTSIDE = {
    "pyproject.toml": """
        [build-system]
        requires = ["surogate-build>=0.2,<0.3"]
        build-backend = "surogate_build.backend"
        [project]
        name = "acme-kernels"
        version = "1.0"
        [tool.scikit-build]
        minimum-version = "1.1"
        wheel.packages = ["src/acme_kernels"]
        wheel.py-api = "cp311"
    """,
    "CMakeLists.txt": """
        cmake_minimum_required(VERSION 3.31.10)
        project(acme_kernels LANGUAGES CXX)
        include("$ENV{SUROGATE_CMAKE_DIR}/SurogateKernels.cmake")
        surogate_add_kernels(acme_kernels USES cublaslt)
    """,
    "csrc/bind_acme.cpp": """
        #include <surogate/bind.h>
        #include <surogate/check.h>
        #include <surogate/dtype.h>
        #include <surogate/gemm.h>
        void write(int64_t* to, const std::vector<int64_t>& rows, double factor, bool twice, cudaStream_t stream) {
            surogate::check_pointer(to, "write", "to", 8);
            *to = static_cast<int64_t>(rows.back() * factor * (1 + twice)) + reinterpret_cast<int64_t>(stream);
        }
        void bind_acme(nanobind::module_& m) {
            m.def("deviation", [] { return surogate::random_deviation(surogate::E4M3); });
            surogate::bind_launcher(m, "write", write);
        }
    """,
    "src/acme_kernels/__init__.py": "",
}
"""A package with kernels outside of this repository, built by an installed surogate-build."""


@pytest.mark.slow
def test_a_package_outside_of_the_repository_compiles_shared_sources_with_nvcc_of_wheels(tmp_path: Path) -> None:
    """Like an install on a machine with a driver and without a toolkit: PATH is /usr/bin only."""
    environment = virtualenvs.create(tmp_path / "venv", on_top_of=Path(pytest.__file__).parents[1])
    source = tmp_path / "acme"
    for name, text in OUTSIDE.items():
        (source / name).parent.mkdir(parents=True, exist_ok=True)
        (source / name).write_text(textwrap.dedent(text))
    caches = os.environ.get("XDG_CACHE_HOME") or str(Path.home() / ".cache")  # headers and nvcc are large downloads
    env = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "XDG_CACHE_HOME": caches, "CUDA_HOME": "/none"}
    env |= {"SUROGATE_CUDA": "on", "CUDAARCHS": "90-real"}

    def python(*command: str | Path) -> str:
        done = subprocess.run(
            [environment.python, *command], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout

    def install(*packages: str | Path) -> None:
        options = ("--no-build-isolation", "--no-deps", "--ignore-installed", "--no-compile", "--quiet")
        python("-m", "pip", "--disable-pip-version-check", "install", *options, *packages)

    install(ROOT / "surogate_build")
    missing = ("-m", "surogate_build.backend")
    wheels = python(*missing).split()
    assert len(wheels) == 5
    install(*wheels)
    assert python(*missing).split() == []
    install(source)
    code = (
        "from acme_kernels import _C\n"
        "from ctypes import addressof, c_int64\n"
        "info = _C.build_info()\n"
        "print(info['cuda'], info['headers'], *info['architectures'], "
        "_C.deviation(), _C.gemm_count(), _C.Gemm.__module__)\n"
        "written = c_int64()\n"
        "_C.write(addressof(written), [3, 5], 1.5, True, 7)\n"
        "print(written.value)\n"
        "try:\n"
        "    _C.write(0, [3], 1.0, False, 0)\n"
        "except ValueError as error:\n"
        "    print(error)"
    )
    built, written, refused = python("-c", code).splitlines()
    cuda, *found = built.split()
    assert cuda.startswith("13.0.")
    assert found == [str(HEADERS), "90-real", "64.0", "0", "acme_kernels._C"]
    assert (written, refused) == ("22", "write: to is a null pointer")


def test_an_unknown_choice_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("scikit_build_core")
    monkeypatch.setenv("SUROGATE_CUDA", "perhaps")
    with pytest.raises(SystemExit, match="SUROGATE_CUDA=perhaps: expected on, off or auto"):
        runpy.run_path(str(BACKEND))


def headers_of_wheel(files: dict[str, str], cache: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the include folder that a build gets if the wheel of `a-library` has these files."""
    spec = importlib.util.spec_from_file_location("fetch_headers", BUILD / "cmake/fetch_headers.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    def download(package: str, into: Path) -> Path:
        with zipfile.ZipFile(into / "a_library.whl", "w") as wheel:
            for name, text in files.items():
                wheel.writestr(name, text)
        return into / "a_library.whl"

    monkeypatch.setattr(module, "download", download)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    return module.folder("a-library==1.0")


def test_headers_that_include_each_other_by_a_folder_include_get_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = {"nvidia/a/include/a.h": '#include "../include/b.h"', "nvidia/a/include/b.h": "", "nvidia/a/lib/a.so": ""}
    folder = headers_of_wheel(files, tmp_path, monkeypatch)
    assert {path.name for path in folder.iterdir()} == {"a.h", "b.h"}
    assert (folder / "../include/b.h").is_file()
    assert [path.name for path in folder.parent.parent.iterdir()] == ["a-library-1.0"]


def test_a_wheel_cannot_write_outside_the_folder_of_its_headers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = headers_of_wheel({"include/../../a.h": "", "include/b.h": ""}, tmp_path, monkeypatch)
    assert {path.name for path in tmp_path.rglob("*.h")} == {"b.h"}
    assert (folder / "b.h").is_file()


def test_only_one_file_includes_the_cudnn_frontend_which_is_slow_to_compile() -> None:
    sources = [path for folder in FOLDERS for path in (folder / "csrc").rglob("*.*")]
    assert [path.name for path in sources if "#include <cudnn_frontend" in path.read_text()] == ["cudnn_graph.h"]
    assert [path.name for path in sources if '#include "cudnn_graph.h"' in path.read_text()] == ["attention_cudnn.cpp"]


def test_ci_compiles_for_each_gpu_whose_code_is_another() -> None:
    """Code for later GPUs is that of the newest one that a source asks for. A folder csrc/sm<arch>/ is for one GPU."""
    compiled = re.search(r"^export CUDAARCHS=\"(.*)\"$", (ROOT / ".ci/run").read_text(), re.M)
    assert compiled
    numbers = {int(target.removesuffix("-real")) for target in compiled[1].split(";")}
    folders = [BUILD / "include", BUILD / "csrc", *(folder / "csrc" for folder in FOLDERS)]
    sources = [path for folder in folders for path in folder.rglob("*.*")]
    text = "".join(path.read_text() for path in sources)
    asked = {int(number) // 10 for number in re.findall(r"__CUDA_ARCH__ *[<>=]+ *(\d+)", text)}
    own = {int(found[1]) for path in sources if (found := re.fullmatch(r"sm(\d+)[af]?", path.parent.name))}
    assert asked and own and numbers >= own and max(numbers) >= max(asked)
    assert "__CUDA_ARCH_" not in text.replace("__CUDA_ARCH__", ""), "it asks for a GPU in another way"


def test_the_page_about_building_lists_every_header() -> None:
    page = (ROOT / "docs/building.md").read_text()
    assert [
        path.name for path in BUILD.glob("include/surogate/*") if not re.search(rf"[`/]{path.name}[`>]", page)
    ] == []


def test_the_version_of_the_headers_is_that_which_core_needs() -> None:
    header = (BUILD / "include/surogate/version.h").read_text()
    assert re.findall(r"#define SUROGATE_HEADERS (\d+)", header) == [str(HEADERS)]


def test_the_header_of_dtypes_has_the_table_of_core() -> None:
    header = (BUILD / "include/surogate/dtype.h").read_text()
    codes = {name: int(code) for name, code in re.findall(r"(\w+) = (\d+)[, ]", header)}
    assert codes == {name.upper(): dtype.code for name, dtype in DTYPES.items()}
    bits, names = (re.findall(r"[\w]+", array) for array in re.findall(r"\[\] = \{(.*)\};", header))
    assert {name: (int(n), code) for code, (n, name) in enumerate(zip(bits, names, strict=True))} == {
        name: (dtype.bits, dtype.code) for name, dtype in DTYPES.items()
    }


SOURCE = r"""
#include <surogate/check.h>
#include <surogate/dtype.h>
#include <surogate/philox.cuh>
#include <surogate/reduce.cuh>
#include <surogate/vec.cuh>

#include <cstdio>

int main() {
    const surogate::PhiloxWords words = surogate::philox4x32_10(0, 0, 0, 0, surogate::philox_keys(0));
    std::printf("%08x %08x %08x %08x\n", words.word[0], words.word[1], words.word[2], words.word[3]);
    unsigned bits;
    for (long long i = 0; std::scanf("%x", &bits) == 1; ++i) {
        float x;
        std::memcpy(&x, &bits, 4);
        const unsigned short random = surogate::random_half(i, SEED, 77, 12345);
        const __nv_bfloat16_raw rounded = surogate::stochastic_round_bf16(x, random);
        std::printf("%x %x\n", static_cast<unsigned>(random), static_cast<unsigned>(rounded.x));
    }
}
"""


@pytest.mark.skipif(NVCC is None, reason="needs nvcc")
def test_random_numbers_and_rounding_in_the_headers_are_bit_identical_to_the_references(tmp_path: Path) -> None:
    assert NVCC is not None
    seed = 0x9123456789ABCDEF - 2**64  # uses both halves of the key and the sign bit
    (tmp_path / "words.cu").write_text(SOURCE)
    command = [
        NVCC,
        "-std=c++17",
        f"-DSEED={seed}LL",
        f"-I{BUILD / 'include'}",
        "-arch=sm_90a",
        "words.cu",
        "-o",
        "words",
    ]
    subprocess.run(command, cwd=tmp_path, check=True)

    generator = torch.Generator().manual_seed(int.from_bytes(os.urandom(4)))
    anything = torch.randint(-(2**31), 2**31, (4001,), generator=generator).to(torch.int32)
    x = torch.cat([anything.view(torch.float32), torch.tensor([0.0, -0.0, torch.inf, -torch.inf, 3.4e38, 1e-45])])
    x = x[~x.isnan()]  # the payload of a NaN is unspecified
    given = "\n".join(f"{bits & 0xFFFFFFFF:x}" for bits in x.view(torch.int32).tolist())
    message = subprocess.run([tmp_path / "words"], input=given, capture_output=True, text=True, check=True).stdout
    known, *rows = message.splitlines()

    zero = torch.zeros(1, dtype=torch.int64)
    assert known == "6627e8d5 e169c58d bc57ac4c 9b00dbd8"
    assert known == " ".join(f"{int(word):08x}" for word in philox4x32((zero, zero, zero, zero), (0, 0)))
    bits = random_16_bits(x.numel(), seed=seed, stream=77, step=12345)
    rounded = round_stochastic(x, bits).view(torch.int16).to(torch.int64) & 0xFFFF
    expected = torch.stack((bits, rounded), dim=1).tolist()
    assert [[int(word, 16) for word in row.split()] for row in rows] == expected
