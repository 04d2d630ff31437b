"""Checks of offload strategies."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from surogate_core.api import OffloadDef
from surogate_core.errors import ConfigError

from ..bench import Bench, differing, shown
from ..check import NotApplicable, proves, variants
from .training import check_resumes


def _runs(definition: OffloadDef, bench: Bench) -> Iterator[dict[str, Any]]:
    """Yield the keys of runs: one for each option that selects it."""
    default = [dict(proposed) for proposed in definition.proposed]
    distinct = {tuple(sorted(keys)): keys for keys in default}
    base = _base(bench)
    found = [{**base, **keys} for keys in variants(bench, definition, list(distinct.values()))]
    if not found:
        raise NotApplicable(
            'nothing says which keys select it. Give an example: SUROGATE_EXAMPLES = {"offload NAME": [{"key": true}]}'
        )
    yield from found


def _base(bench: Bench) -> dict[str, Any]:
    """Return the keys of a run without it: enough blocks that some are not in use, and a master for each weight."""
    model = bench.model_dir({**bench.config_of(bench.model)[0], "num_hidden_layers": 4})
    return {"model": str(model), "model_dtype": "bf16", "master_dtype": "fp32"}


@proves("offload", remedy="Move values, and compute nothing else.")
def a_run_with_it_has_the_bits_of_one_without(definition: OffloadDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        plain = bench.steps(**_base(bench))
        try:
            moved = bench.steps(**keys)
        except ConfigError as error:
            raise NotApplicable(f"it refuses a tiny run: {error}") from None
        for steps in (plain, moved):
            steps.step()
            steps.step()
        one, other = (s.bits("param", "state") for s in (plain, moved))
        assert torch.isfinite(plain.view(plain.assembly.loss))
        wrong = [name for name in differing(one, other) if name in one and name in other]
        assert not wrong, f"with {keys}, {shown(wrong)} differ"


@proves("offload", remedy="Return from on_host, or move by schedule, what the device need not hold.")
def a_plan_with_it_holds_fewer_bytes_on_the_device(definition: OffloadDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        try:
            report = bench.plan(**keys).report
        except ConfigError as error:
            raise NotApplicable(f"it refuses a tiny run: {error}") from None
        assert report.pinned_bytes > 0, f"with {keys} the host holds nothing"


@proves("offload", remedy="What is saved must not depend on where it was held.")
def a_run_resumed_with_it_has_the_bits_of_one_without(definition: OffloadDef, bench: Bench) -> None:
    for keys in _runs(definition, bench):
        try:
            check_resumes(bench, keys, _base(bench))
        except ConfigError as error:
            raise NotApplicable(f"it refuses a tiny run: {error}") from None


@proves("offload", remedy="OffloadDef.selected must be false for the options' defaults.")
def it_is_off_unless_a_key_selects_it(definition: OffloadDef, bench: Bench) -> None:
    assert not definition.selected(definition.options()), "it is selected by the defaults of its options"
    for proposed in definition.proposed:
        assert definition.selected(definition.options(**proposed)), f"proposed {dict(proposed)} does not select it"
