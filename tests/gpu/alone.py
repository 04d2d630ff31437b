"""Tests that measure a GPU need it alone."""

from __future__ import annotations

import os

import pytest

ALONE = pytest.mark.skipif("PYTEST_XDIST_WORKER" in os.environ, reason="measures the whole GPU: run without -n")
