"""Packed documents that affect each other are detected before step one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from math import log
from typing import Any

import numpy as np
import pytest
import torch
from models.harness import OPS, plan_inputs, tiny_config
from models.test_parity import QWEN3_5
from torch import Tensor

from surogate.data.asked import Asked
from surogate.data.cache import TokenDataset
from surogate.data.pack import DocumentSpans, PackedRows, pack
from surogate.training.packing_check import PackingCheck, check_packing
from surogate.world.processes import Processes
from surogate_core.api import OpDef, PrecisionRequest, World
from surogate_core.assembly.assemble import assemble
from surogate_core.batch import MicroBatch
from surogate_core.errors import ProgramError
from surogate_core.reference.attention import attention
from surogate_core.runtime.initialize import initialize
from surogate_core.runtime.worker import Worker
from surogate_models_hybrid import reference

SEQ_LEN, ROWS, VOCAB = 64, 2, 61
CONFIG = tiny_config(vocab_size=VOCAB, hidden_size=24, intermediate_size=40, num_hidden_layers=2, head_dim=8)


def rows_of(lengths: list[int]) -> PackedRows:
    n = sum(lengths)
    tokens = np.random.default_rng(0).integers(0, VOCAB, n, dtype=np.uint16)
    dataset = TokenDataset(
        tokens=tokens,
        mask=np.full(-(-n // 8), 255, np.uint8),
        offsets=np.concatenate([[0], np.cumsum(lengths)]).astype(np.int64),
        n_bytes=n,
        max_token=VOCAB - 1,
        n_trained=n,
    )
    return pack(DocumentSpans.of([dataset]), SEQ_LEN)


def check(
    rows: PackedRows,
    dtype: str,
    ops: Mapping[str, OpDef] = OPS,
    config: Mapping[str, Any] = CONFIG,
    decay: float | None = None,
) -> PackingCheck | None:
    """decay: of all states, how much of its logarithm is lost at a token, about; None: as it is drawn."""
    given = plan_inputs(
        config,
        batch_size=ROWS,
        seq_len=SEQ_LEN,
        max_documents=ROWS * rows.max_documents,
        request=PrecisionRequest(model_dtype=dtype),
    )
    assembly = assemble(given)
    worker = Worker.on_cpu(assembly, ops, seed=1)
    initialize((v for v in assembly.declared if v.init), worker.buffers.persistent, 3)
    for name, param in assembly.params.items():
        if decay is not None and name.endswith(".a_log"):
            worker.buffers.persistent(param).fill_(log(decay))
    worker.start()
    return check_packing(worker, rows, ROWS, 0, (dtype,), Processes(World()))


def across(qkv: Tensor, cu_seqlens: Tensor, **attrs: Any) -> tuple[Tensor, Tensor]:
    """Attention that treats every row as one document."""
    rows = torch.arange(0, qkv.shape[0] + 1, SEQ_LEN, dtype=cu_seqlens.dtype)
    return attention(qkv, rows, **attrs)


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_independent_documents_have_the_same_loss_packed_and_alone(dtype: str) -> None:
    found = check(rows_of([20, 30, 9, 40, 22, 64, 13, 5]), dtype)
    assert found and (found.documents, found.rows, found.labels) == (7, 3, 139 - 7)
    assert abs(found.packed - found.alone) < found.tolerance / 2


def test_attention_across_documents_is_refused() -> None:
    with pytest.raises(ProgramError, match=r"packing: 7 documents .* sample_packing: false"):
        check(
            rows_of([20, 30, 9, 40, 22, 64, 13, 5]),
            "fp32",
            OPS | {"attention": replace(OPS["attention"], reference=f"{__name__}:across")},
        )


HYBRID = CONFIG | tiny_config(**QWEN3_5 | {"vocab_size": VOCAB, "hidden_size": 24, "intermediate_size": 40})


def leak(monkeypatch: pytest.MonkeyPatch, function: str) -> None:
    """Let a function of the references of hybrid models take a micro-batch for one document."""
    original = getattr(reference, function)

    def leaking(*given: Any) -> Any:
        positions = [i for i, x in enumerate(given) if isinstance(x, Tensor) and x.dtype == torch.int32]
        return original(*(torch.arange(len(x)) if i in positions else x for i, x in enumerate(given)))

    monkeypatch.setattr(reference, function, leaking)


@pytest.mark.parametrize(("function", "decay"), [("_masks", 0.01), ("_masks", 0.05), ("_tap", 16.0)])
def test_a_state_or_a_convolution_that_leaks_into_the_next_document_is_refused(
    function: str, decay: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Decays are slow, as in trained models."""
    rows = rows_of([20, 30, 9, 40, 22, 64, 13, 5])
    assert check(rows, "fp32", config=HYBRID, decay=decay)
    leak(monkeypatch, function)
    with pytest.raises(ProgramError, match=r"packing: 7 documents .* sample_packing: false"):
        check(rows, "fp32", config=HYBRID, decay=decay)


def test_fast_decays_hide_a_leak_from_the_check_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hence `surogate plugins test` lets decays be slow."""
    leak(monkeypatch, "_masks")
    assert check(rows_of([20, 30, 9, 40, 22, 64, 13, 5]), "fp32", config=HYBRID, decay=16.0)


def test_rows_of_one_document_are_not_checked() -> None:
    assert check(rows_of([64, 64, 50]), "fp32") is None


def test_only_some_of_many_documents_are_compared() -> None:
    found = check(rows_of([7] * 400), "fp32")
    assert found and found.documents <= 25


class _NearZero:
    """A worker whose loss of pairs is small, packed a little larger than alone."""

    def __init__(self) -> None:
        self.batches = 0

    def evaluate(self, batch: MicroBatch) -> tuple[float, ...]:
        self.batches += 1
        return (batch.n_groups * (0.0105 if self.batches <= 2 else 0.01),)


def test_rounding_of_a_loss_of_groups_may_be_larger_than_the_loss_itself_explains() -> None:
    """A hinge loss is near 0 once most pairs are beyond it, but the log-probabilities of the others round as ever."""
    rows = replace(rows_of([20, 30, 9, 40, 22, 64, 13, 5]), asked=Asked("hinge", (), 1))
    worker: Any = _NearZero()
    found = check_packing(worker, rows, ROWS, 0, ("bf16",), Processes(World()), "group")
    assert found is not None and found.packed > found.alone
