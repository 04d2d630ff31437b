"""All packages have one version, and `dev/bump.py` writes another one wherever it is named."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path

from surogate_core import __version__

ROOT = Path(__file__).parents[2]
BEFORE = """name = "surogate-lora"
version = "0.1.0"
dependencies = ["surogate-core[hub]>=0.1,<0.2", "peft>=0.1.0"]
__version__ = "0.1.0"
recipe bf16 of surogate-recipe-bf16 0.1.0, surogate_lora-0.1.0-py3-none-any.whl, surogate-0.1.0
name = "acme"
version = "0.1.0"
optimizer sgd of acme-surogate-sgd 0.1.0, surogate-core 0.1.01
"""
AFTER = """name = "surogate-lora"
version = "0.2.0"
dependencies = ["surogate-core[hub]>=0.2,<0.3", "peft>=0.1.0"]
__version__ = "0.2.0"
recipe bf16 of surogate-recipe-bf16 0.2.0, surogate_lora-0.2.0-py3-none-any.whl, surogate-0.2.0
name = "acme"
version = "0.1.0"
optimizer sgd of acme-surogate-sgd 0.1.0, surogate-core 0.1.01
"""


def test_a_bump_changes_the_versions_of_this_repository_alone() -> None:
    spec = importlib.util.spec_from_file_location("bump", ROOT / "dev/bump.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    assert module.bumped(BEFORE, "0.1.0", "0.2.0") == AFTER


def test_all_packages_have_the_version_of_core_and_require_its_minor() -> None:
    major, minor = map(int, __version__.split(".")[:2])
    files = [path for folder in (ROOT, ROOT / "plugins") for path in folder.glob("*/pyproject.toml")]
    texts = [path.read_text() for path in (ROOT / "pyproject.toml", *files)]
    ours = [project for text in texts if (project := tomllib.loads(text)["project"])["name"].startswith("surogate")]
    assert len(ours) > 30 and {project["version"] for project in ours} == {__version__}
    ranges = re.findall(r'"surogate[\w-]*(?:\[[\w,]+\])?([^"]+)"', "\n".join(re.findall(r".*>=.*", "".join(texts))))
    assert set(ranges) == {f">={major}.{minor},<{major}.{minor + 1}"}
