from __future__ import annotations

import pytest
from acme_plugin.plugin import VARIABLE, Options, join, matches

from surogate_core.api import ConfigError, JoinContext


def test_the_variable_comes_before_the_key() -> None:
    options = Options(acme_toy_device=1)
    assert list(join(JoinContext(environment={}, device_count=4, on_gpu=True), options).devices) == [1]
    assert list(join(JoinContext(environment={VARIABLE: "3"}, device_count=4, on_gpu=True), options).devices) == [3]


def test_a_device_that_the_machine_does_not_have_is_an_error() -> None:
    for given in ("4", "-1", "two"):
        with pytest.raises(ConfigError, match="this machine has 4"):
            join(JoinContext(environment={VARIABLE: given}, device_count=4, on_gpu=True), Options())


def test_it_is_selected_where_its_variable_is_set() -> None:
    assert matches({VARIABLE: "0"}) == VARIABLE
    assert matches({}) == ""
