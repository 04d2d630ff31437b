"""Options of the checks of the wheels."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--constraint", default="", help="options for pip, as the Makefile decides them")
