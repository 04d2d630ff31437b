"""Every rank issues the same collectives in the same order, whatever its batches hold."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from models.harness import OPS, plan_inputs, tiny_config
from random_batches import random_batch

from surogate_core.assembly.assemble import assemble
from surogate_core.errors import ProgramError
from surogate_core.program.verify import check_collectives
from surogate_core.runtime.comms import copies
from surogate_core.runtime.initialize import initialize
from surogate_core.runtime.team import Team
from surogate_core.runtime.worker import Worker

RANKS, ROWS, SEQ_LEN, DOCUMENTS = 4, 2, 32, 64
CONFIG = tiny_config(vocab_size=61, hidden_size=24, intermediate_size=40, num_hidden_layers=2, head_dim=8)


class Recorder(copies.CopiesComm):
    """Records its calls: the method, and elements and dtypes without addresses."""

    def __init__(self, of: copies.CopiesComm) -> None:
        super().__init__(of._meeting, of.rank, of.device)
        self.calls: list[Any] = []

    def all_reduce(self, spans: Any, how: Any, stream: int) -> None:
        self.calls.append(("all_reduce", [span[1:] for span in spans], how))
        super().all_reduce(spans, how, stream)


@pytest.mark.parametrize("seed", range(3))
def test_four_ranks_record_the_same_calls_over_random_batches(seed: int) -> None:
    sizes = {"batch_size": ROWS, "seq_len": SEQ_LEN, "max_documents": DOCUMENTS, "grad_accum_steps": 2}
    assembly = assemble(plan_inputs(CONFIG, **sizes, world_size=RANKS))
    comms = [Recorder(comm) for comm in copies.connect([0] * RANKS, seconds=20)]
    team = Team(comms, lambda comm: Worker.on_cpu(assembly, OPS, 1, comm))
    rng = np.random.default_rng(seed)
    try:
        initialize((v for v in assembly.declared if v.init), team.buffers.persistent, 3)
        team.start()
        for step in range(1, 6):
            for micro in range(2):
                batches = [random_batch(rng, CONFIG, ROWS, SEQ_LEN, DOCUMENTS) for _ in range(RANKS)]
                index = 2 * RANKS * step + RANKS * micro
                team.micro_step(*batches, first=micro == 0, last=micro == 1, loss_scale=0.01, index=index)
            team.update(lr=1e-3, step=step).values()
            team.evaluate(*(random_batch(rng, CONFIG, ROWS, SEQ_LEN, DOCUMENTS) for _ in range(RANKS)))
    finally:
        team.close()
    first = comms[0].calls
    assert len(first) % 5 == 0 and len(first) >= 5 * (CONFIG["num_hidden_layers"] + 2)
    assert all(comm.calls == first for comm in comms)


def test_a_variant_with_other_collectives_is_refused() -> None:
    sizes = {"batch_size": ROWS, "seq_len": SEQ_LEN, "max_documents": DOCUMENTS, "grad_accum_steps": 1}
    assembly = assemble(plan_inputs(CONFIG, **sizes, world_size=RANKS))
    program, variant = assembly.programs["micro_only"], assembly.variants["micro_only"][0]
    check_collectives(program, variant)
    last = max(index for index, op in enumerate(variant.ops) if op.lane == "comm")
    fewer = replace(variant, ops=(*variant.ops[:last], *variant.ops[last + 1 :]))
    with pytest.raises(ProgramError, match=r"micro_only@\d+ has \d+ collectives, which are not the \d+ of micro_only"):
        check_collectives(program, fewer)
