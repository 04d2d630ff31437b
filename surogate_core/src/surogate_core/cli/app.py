"""The command `surogate`, where scripts of 0.2 look for it."""

from __future__ import annotations

from ..moved import program


def main() -> None:
    program("surogate.cli.app", __name__).main()
