"""States that an optimizer declares for parts of params."""

from __future__ import annotations

from dataclasses import replace

import pytest
from models.harness import plan_inputs, tiny_config

from surogate_core.api import Init, UpdateContext
from surogate_core.assembly.assemble import assemble
from surogate_core.errors import PluginError
from surogate_core.origin import Origin
from surogate_core.program.shards import Sharding
from surogate_optim_adamw.adamw import ADAMW

ORIGIN = Origin("optimizer", "acme", "acme-optim", "1.0", "acme")


@pytest.mark.parametrize("init", [Init(kind="normal", std=1e-3), Init(kind="uniform", bound=1e-3)])
def test_random_contents_of_a_part_are_refused(init: Init) -> None:
    """Each rank would draw those of its part from the same numbers, and one rank others."""

    def update(context: UpdateContext) -> None:
        for p in context.params:
            context.builder.state(f"acme.{p.name}", p.param.shape, "fp32", init)
        ADAMW.update(context)

    optimizer = replace(ADAMW, name="acme", update=update, origin=ORIGIN)
    given = {"config": tiny_config(), "world_size": 2, "optimizer": optimizer}
    assert assemble(plan_inputs(**given, sharding=Sharding(parts=2))).only("update")
    line = (
        r"optimizer acme of acme-optim 1.0 failed in update: declares acme.embedding:fp32\[\d+\] for a part of a "
        rf"param with {init.kind} contents, .*: write the state in the first step, or return 0 from `granularity`"
    )
    with pytest.raises(PluginError, match=line):
        assemble(plan_inputs(**given, sharding=Sharding(parts=2, states=True)))
