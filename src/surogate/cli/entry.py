"""The start of the `surogate` script: Ctrl-C ends it without a traceback while the program is imported."""

from __future__ import annotations

from .early_interrupt import expect


def main() -> None:
    """The `surogate` script: see `app.main`."""
    expect()
    from .app import main as command

    command()
