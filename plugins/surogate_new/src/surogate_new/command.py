"""`surogate new`."""

from __future__ import annotations

import json
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated

import typer

from surogate_core.api import ConfigError

from .package import LAYERS, Package, write

_KINDS = ", ".join(LAYERS)


def new(
    kind: Annotated[str, typer.Argument(metavar="KIND", help=f"What the plugin provides: {_KINDS}.")],
    directory: Annotated[Path, typer.Argument(metavar="DIRECTORY", help="New or empty folder for the package.")],
    name: Annotated[
        str | None, typer.Option("--name", metavar="NAME", help="Name of the package. Default: that of DIRECTORY.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Write a package for a plugin: a small definition that works, tests, CI and a run that trains with it.

    Examples:
    surogate new optimizer my-optimizer
    """
    if kind not in LAYERS:
        near = get_close_matches(kind, LAYERS, n=1)
        hint = f"did you mean {near[0]}?" if near else f"kinds: {_KINDS}"
        raise ConfigError(f"surogate new {kind}: is no kind of plugin; {hint}")
    package = Package(kind, name or directory.resolve().name)
    written = write(package, directory)
    if as_json:
        files = [path.relative_to(directory).as_posix() for path in written]
        print(json.dumps({"folder": str(directory), "package": package.distribution, "files": files}, indent=2))
        return
    print(f"{directory}: {len(written)} files, package {package.distribution}. README.md has the first commands.")
