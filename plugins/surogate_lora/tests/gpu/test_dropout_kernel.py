"""The compiled lora_dropout against its reference: the same bits, for any size, seed and alignment."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from surogate_core.api import Op, Value
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.binding import bind_kernel, run_kernel
from surogate_core.testing.cases import cases
from surogate_core.testing.kernels import guarded, same_bits
from surogate_lora.kernels import KERNELS
from surogate_lora.reference import lora_dropout

pytestmark = pytest.mark.gpu

TICK = Value(name="micro_step", shape=(), dtype="int32", role="input")
SEED = Value(name="seed", shape=(), dtype="int64", role="input")
FLOATS = ("fp32", "bf16")


def case(
    shape: tuple[int, ...],
    dtype: str,
    *,
    rate: float = 0.3,
    stream: int = 0x9ABCDEF1,
    micro_step: int = 7,
    seed: int = 11,
    row: int = 0,
) -> tuple[Op, dict[Value, Tensor]]:
    x, y = (Value(name=name, shape=shape, dtype=dtype, role="act") for name in "xy")
    content = torch.randn(shape).to(TORCH_DTYPES[dtype])
    content.view(-1)[0] = -0.0
    contents = {x: content, TICK: torch.tensor(micro_step, dtype=torch.int32), SEED: torch.tensor(seed)}
    return Op("lora_dropout", (x, TICK, SEED), (y,), {"rate": rate, "stream": stream, "row": row}), contents


def check(shape: tuple[int, ...], dtype: str, skew: int = 0, **keys: Any) -> None:
    op, contents = case(shape, dtype, **keys)
    (out,) = run_kernel(KERNELS, op, contents, skew=skew)
    expected = lora_dropout(*contents.values(), **op.attrs)
    assert same_bits(out, expected), f"{int((out.float() != expected.float()).sum())} of {out.numel()} elements differ"


@pytest.mark.parametrize(
    "shape", cases([(1, 1), (1, 7), (3, 5), (7, 301), (33, 64), (5, 2048)], more=[(1, 8), (4099, 1024), (8192, 3072)])
)
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("skew", [0, 1])
def test_the_same_elements_are_dropped_and_scaled(shape: tuple[int, int], dtype: str, skew: int) -> None:
    check(shape, dtype, skew)


@pytest.mark.parametrize("seed", [0, -1, (1 << 63) - 1, -(1 << 40)])
@pytest.mark.parametrize("micro_step", [0, 1, 2**31 - 1])
def test_seeds_ticks_and_streams(seed: int, micro_step: int) -> None:
    for stream in (0, 2**32 - 1):
        check((40, 77), "bf16", seed=seed, micro_step=micro_step, stream=stream)


@pytest.mark.parametrize("row", [1, 128, 1 << 26])
def test_rows_of_a_matrix_drop_what_the_matrix_drops(row: int) -> None:
    check((33, 64), "bf16", row=row)
    check((5, 2048), "fp32", skew=1, row=row)


@pytest.mark.parametrize("rate", [1e-9, 0.05, 0.1, 0.5, 0.999, 1 - 1e-9])
def test_rates(rate: float) -> None:
    check((60, 1000), "bf16", rate=rate)
    check((60, 1000), "fp32", rate=rate)


def test_a_dropped_nan_is_gone_and_a_kept_one_stays() -> None:
    op, contents = case((64, 64), "bf16")
    x = op.ins[0]
    kept = lora_dropout(torch.ones(64, 64), contents[TICK], contents[SEED], **op.attrs) != 0
    (out,) = run_kernel(KERNELS, op, contents | {x: torch.full((64, 64), torch.nan).bfloat16()})
    assert torch.equal(out.isnan(), kept) and not out[~kept].any()


def test_a_captured_launch_reads_tick_and_seed_when_it_runs() -> None:
    op, contents = case((40, 1000), "bf16")
    binding = bind_kernel(KERNELS, op, contents)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        binding.launch(torch.cuda.current_stream().cuda_stream)
    for micro_step, seed in ((8, 11), (8, -3)):
        now = contents | {TICK: torch.tensor(micro_step, dtype=torch.int32), SEED: torch.tensor(seed)}
        for value in (TICK, SEED):
            binding.buffers[value].tensor.copy_(now[value])
        graph.replay()
        torch.cuda.synchronize()
        assert same_bits(binding.buffers[op.outs[0]].tensor.cpu(), lora_dropout(*now.values(), **op.attrs))


def test_wrong_arguments_are_named() -> None:
    from surogate_lora import _C

    p = guarded((64,), torch.float32).pointer
    for call, message in (
        (lambda: _C.lora_dropout(p, 0, p, p, 8, 0, 0, 9, 1.0, 0, 0), "lora_dropout: micro_step is a null pointer"),
        (
            lambda: _C.lora_dropout(p, p, p + 4, p, 8, 0, 0, 9, 1.0, 0, 0),
            "lora_dropout: seed must be aligned to 8 bytes",
        ),
        (lambda: _C.lora_dropout(p, p, p, p, 0, 0, 0, 9, 1.0, 0, 0), "lora_dropout: size must be positive"),
        (lambda: _C.lora_dropout(p, p, p, p, 8, 0, 0, 1 << 16, 1.0, 0, 0), "lora_dropout: dropped must be between"),
        (lambda: _C.lora_dropout(p, p, p, p, 8, 4, 0, 9, 1.0, 0, 0), "lora_dropout: first must be a multiple of 8"),
        (lambda: _C.lora_dropout(p, p, p, p, 8, 0, 0, 9, 1.0, 2, 0), "lora_dropout: x must be fp32 or bf16, not fp64"),
    ):
        with pytest.raises(ValueError, match=message):
            call()
