"""Throw-away virtual environments for tests that install packages."""

from __future__ import annotations

import os
import subprocess
import sys
import venv
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Environment:
    """A virtual environment and how to run things in it, away from the checkout and its settings."""

    root: Path

    @property
    def python(self) -> Path:
        return self.root / "bin/python"

    @property
    def site_packages(self) -> Path:
        return next(self.root.glob("lib/python3.*/site-packages"))

    def run(self, *command: str | Path, cwd: Path | None = None, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run a program of this environment (or a path) from its root; fails unless it exits with `code`."""
        program = Path(command[0])
        here = self.root / "bin" / program
        environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
        result = subprocess.run(
            [here if here.exists() else program, *command[1:]],
            cwd=cwd or self.root,
            env=environ | {"PATH": f"{self.root / 'bin'}:{os.environ['PATH']}", "PYTHONNOUSERSITE": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
        printed = f"{' '.join(map(str, command))}: exit {result.returncode}, expected {code}"
        assert result.returncode == code, f"{printed}\n{result.stdout}\n{result.stderr}"
        return result

    def pip(self, *args: str | Path, code: int = 0) -> subprocess.CompletedProcess[str]:
        """Run pip of this environment."""
        return self.run("python", "-m", "pip", "--disable-pip-version-check", *args, code=code)


def create(root: Path, *, on_top_of: Path | None = None) -> Environment:
    """Return a new environment with pip. It also sees the site-packages `on_top_of`, .pth files included.

    pip takes the packages of `on_top_of` for installed, so only the packages under test need installing. It is the pip
    of `on_top_of`: installing one takes five seconds.
    """
    venv.create(root, with_pip=on_top_of is None, symlinks=True, clear=True)
    environment = Environment(root)
    if on_top_of is not None:
        pip = root / "bin/pip"
        pip.write_text(f"#!{environment.python}\nfrom pip._internal.cli.main import main\nraise SystemExit(main())\n")
        pip.chmod(0o755)
        line = f"import site; site.addsitedir({str(on_top_of)!r})\n"
        (environment.site_packages / "beneath.pth").write_text(line)
    return environment


def current_site_packages() -> Path:
    """site-packages of the environment that the tests run in."""
    return next(Path(sys.prefix).glob("lib/python3.*/site-packages"))
