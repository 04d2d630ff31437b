"""Options of the wheel tests."""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--constraint", default="", help="options for pip, set by the Makefile")
