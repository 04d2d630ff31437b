"""The compiled adamw is bit-identical to the reference, for every combination of dtypes and any size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from sharding.parts import divided, firsts, joined, placed
from torch import Tensor

from surogate_core.api import Op, Place, Value
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.binding import bind_kernel, run_kernel
from surogate_core.testing.kernels import plain_nan, same_bits
from surogate_optim_adamw.kernels import CHUNK_SIZE, KERNELS
from surogate_optim_adamw.reference import adamw

pytestmark = pytest.mark.gpu

CLIP_COEF = Value(name="clip_coef", shape=(), dtype="fp32", role="act")
LR = Value(name="lr", shape=(), dtype="fp32", role="input")
STEP = Value(name="step", shape=(), dtype="int32", role="input")
SEED = Value(name="seed", shape=(), dtype="int64", role="input")

SIZES = [1, 7, 8, 9, 2047, 2049, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 3 * CHUNK_SIZE + 5]


@pytest.fixture(autouse=True)
def exact_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, torch computes fp32 square roots with a vector library, some with an error of one unit. The kernel's
    are exact.

    With exact ones in the reference too, all bits must agree: a root in fp64, rounded, is the exact one.
    """
    root = Tensor.sqrt
    monkeypatch.setattr(Tensor, "sqrt", lambda x: root(x.double()).to(x.dtype))


class Update:
    """An `adamw` op over vectors, and the contents of its inputs."""

    def __init__(
        self,
        sizes: Sequence[int],
        grad: str = "fp32",
        master: str = "fp32",
        m: str = "fp32",
        v: str = "fp32",
        copy: str | None = None,
        *,
        clip_coef: float = 0.7,
        lr: float = 3e-4,
        step: int = 7,
        seed: int = 1234567890123,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        place: Place = "device",
    ) -> None:
        n = len(sizes)
        gen = torch.Generator().manual_seed(n)

        def vectors(name: str, dtype: str, indices: Sequence[int]) -> list[Value]:
            return [
                Value(name=f"{name}{i}", shape=(sizes[i],), dtype=dtype, role="state", place=place) for i in indices
            ]

        def drawn(value: Value) -> Tensor:
            x = torch.randn(value.shape, generator=gen) * 0.1
            return (x.square() if value.name.startswith("v") else x).to(TORCH_DTYPES[value.dtype])

        # Every third tensor has no work copy, every second no decay.
        copied = tuple(i for i in range(n) if i % 3 != 2) if copy else ()
        grads, masters, ms, vs = (
            vectors(*column, range(n)) for column in (("g", grad), ("p", master), ("m", m), ("v", v))
        )
        copies = vectors("copy", copy, copied) if copy else []
        # Every fourth tensor has no amax.
        measured = tuple(i for i in range(n) if i % 4 != 1)
        amaxes = [Value(name=f"amax{i}", shape=(), dtype="fp32", role="act") for i in measured]
        self.attrs: dict[str, Any] = {
            "n": n,
            "copied": copied,
            "copy_dtypes": tuple(c.dtype for c in copies),
            "measured": measured,
            "weight_decay": tuple(0.1 * (i % 2) for i in range(n)),
            "streams": tuple((0x9ABCDEF1 * (i + 1)) & 0xFFFFFFFF for i in range(n)),
            "beta1": 0.9,
            "beta2": beta2,
            "epsilon": epsilon,
        }
        self.op = Op(
            "adamw",
            (CLIP_COEF, LR, STEP, SEED, *grads, *masters, *ms, *vs),
            (*masters, *ms, *vs, *copies, *amaxes),
            self.attrs,
        )
        self.contents: dict[Value, Tensor] = {
            CLIP_COEF: torch.tensor(clip_coef),
            LR: torch.tensor(lr),
            STEP: torch.tensor(step, dtype=torch.int32),
            SEED: torch.tensor(seed),
            **{value: drawn(value) for value in (*grads, *masters, *ms, *vs)},
        }

    def reference(self, *, firsts: Sequence[int] = (), **scalars: Tensor) -> tuple[Tensor, ...]:
        ins = [scalars.get(v.name, self.contents[v]) for v in self.op.ins]
        return adamw(*ins, **self.attrs, firsts=firsts)

    def check(self, outs: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
        """Check without tolerance, for fp32 states too: each operation is rounded separately as in the reference.

        Only the bits of NaN may differ.
        """
        for value, a, b in zip(self.op.outs, map(plain_nan, outs), map(plain_nan, theirs), strict=True):
            wrong = int((a.float() != b.float()).sum())
            assert same_bits(a, b), f"{value!r}: {wrong} elements differ, by {(a.float() - b.float()).abs().max()}"


@pytest.mark.parametrize(
    ("grad", "master", "m", "v", "copy"),
    [
        *((g, p, s, s, c) for g, p, s, c in product(("fp32", "bf16"), repeat=4)),
        *((g, p, s, s, None) for g, p, s in product(("fp32", "bf16"), repeat=3)),
        ("fp32", "fp32", "bf16", "fp32", None),
        ("fp32", "fp32", "fp32", "bf16", None),
    ],
)
@pytest.mark.parametrize("place", ["device", "host"])
def test_a_step_is_bit_identical_to_the_reference(
    grad: str, master: str, m: str, v: str, copy: str | None, place: Place
) -> None:
    """The buffers are on the device: it is the place of the values that chooses the accesses."""
    update = Update(SIZES, grad, master, m, v, copy, place=place)
    update.check(run_kernel(KERNELS, update.op, update.contents), update.reference())


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_unaligned_buffers_are_bit_identical_to_the_reference(dtype: str) -> None:
    update = Update(SIZES, dtype, dtype, dtype, dtype, "bf16")
    update.check(run_kernel(KERNELS, update.op, update.contents, skew=1), update.reference())


def test_more_tensors_than_threads_per_block_are_bit_identical_to_the_reference() -> None:
    update = Update([1 + 37 * i for i in range(700)], "bf16", "bf16", "bf16", "bf16")
    update.check(run_kernel(KERNELS, update.op, update.contents), update.reference())


@pytest.mark.parametrize("step", [1, 2, 1000, 10**6])
@pytest.mark.parametrize("seed", [0, -1, (1 << 63) - 1])
def test_any_step_and_seed_are_bit_identical_to_the_reference(step: int, seed: int) -> None:
    update = Update([1000, 513], "bf16", "bf16", "bf16", "bf16", step=step, seed=seed, lr=0.02)
    update.check(run_kernel(KERNELS, update.op, update.contents), update.reference())


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize(
    "dtypes", [("bf16",) * 5, ("fp32", "bf16", "fp32", "bf16", None), ("fp32", "fp32", "bf16", "bf16", "bf16")]
)
@pytest.mark.parametrize("place", ["device", "host"])
def test_the_parts_of_a_step_have_the_bits_of_the_whole(parts: int, dtypes: Sequence[Any], place: Place) -> None:
    """Parts begin at any multiple of 256 elements, inside the chunks of the kernel too. The last may be all padding."""
    update = Update([300, 5000, 3 * CHUNK_SIZE + 5, 300_001], *dtypes, place=place)
    whole = dict(zip(update.op.outs, run_kernel(KERNELS, update.op, update.contents), strict=True))
    ranks = [
        run_kernel(KERNELS, op, contents, rank=rank)
        for rank, (op, contents) in enumerate(divided(update.op, update.contents, parts))
    ]
    for value, found in joined(update.op, ranks):
        assert same_bits(found, whole[value]), value


@pytest.mark.parametrize("skew", [0, 1])
def test_the_random_bits_of_a_part_that_begins_beyond_2_to_the_35_are_the_references(skew: int) -> None:
    """There the second word of the Philox counter is not 0."""
    update = Update([1 << 16, 2049], "bf16", "bf16", "bf16", "bf16")
    rank = (1 << 20) + 3
    update.op, update.contents = placed(update.op, update.contents, 1 << 16, rank)
    begins = firsts(update.op, rank)
    assert begins[:2] == (rank << 16, 0) and rank << 16 > 1 << 35
    outs = run_kernel(KERNELS, update.op, update.contents, skew=skew, rank=rank)
    update.check(outs, update.reference(firsts=begins))


def test_large_and_tiny_gradients_are_bit_identical_to_the_reference() -> None:
    """The second moments overflow, are subnormal or are zero."""
    update = Update([4096, 4096, 4096])
    values = dict(zip(("g0", "g1", "g2", "v1", "v2"), (1e25, 1e-22, 0.0, 0.0, 0.0), strict=True))
    for value, content in update.contents.items():
        if value.name in values:
            content.mul_(values[value.name])
    update.check(run_kernel(KERNELS, update.op, update.contents), update.reference())


SPECIAL = [0.0, -0.0, 1e-45, -3e-43, 1e-38, 2e-36, -1e-30, 1e-20, -1e-16, 1e-10, 1e3, 1e18, -1e25, 3e37, torch.inf]
"""Magnitudes that need special cases in the root or a quotient, or overflow in the arithmetic without them."""


@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_special_values_are_bit_identical_to_the_reference(dtype: str) -> None:
    """All combinations of magnitudes of the four operands, one in each octet of otherwise usual elements. Gradients are
    finite: a step with others is skipped."""
    rows = torch.tensor(list(product(SPECIAL[:-1], SPECIAL, SPECIAL, [abs(x) for x in SPECIAL])))
    update = Update([8 * len(rows)], dtype, dtype, dtype, dtype)
    places = torch.arange(len(rows)) * 8 + torch.arange(len(rows)) % 8
    for column, value in zip(rows.T, update.op.ins[4:], strict=True):
        update.contents[value][places] = column.to(TORCH_DTYPES[dtype])
    update.check(run_kernel(KERNELS, update.op, update.contents), update.reference())


@pytest.mark.parametrize(
    "scalars",
    [
        {"epsilon": 1e-35},
        {"epsilon": 1e-42},
        {"epsilon": 1e-50},
        {"lr": 0.0},
        {"lr": 1e-30},
        {"lr": 1e20},
        {"beta2": 0.0},
        {"beta2": 1 - 2.0**-50, "step": 1},
        {"clip_coef": 1e-30},
        {"clip_coef": -1e30},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", ["fp32", "bf16"])
def test_any_options_are_bit_identical_to_the_reference(dtype: str, scalars: Mapping[str, Any]) -> None:
    update = Update([5000, 8], dtype, dtype, dtype, dtype, **scalars)
    update.check(run_kernel(KERNELS, update.op, update.contents), update.reference())


@pytest.mark.parametrize("special", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize(("master", "copy"), [("fp32", None), ("bf16", None), ("fp32", "bf16"), ("bf16", "fp32")])
@pytest.mark.parametrize("coef", [1.0, torch.nan])
def test_an_amax_is_not_finite_if_the_param_is_not(special: float, master: str, copy: str | None, coef: float) -> None:
    update = Update([CHUNK_SIZE + 100], "fp32", master, "bf16", "bf16", copy, clip_coef=coef)
    (values,) = (x for value, x in update.contents.items() if value.name == "p0")
    values[CHUNK_SIZE + 77] = special
    outs = run_kernel(KERNELS, update.op, update.contents)
    assert same_bits(plain_nan(outs[-1]), torch.tensor(special).abs())


@pytest.mark.parametrize("coef", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("master", "copy"), [("bf16", "fp32"), ("fp32", "bf16"), ("bf16", None), ("fp32", None)])
@pytest.mark.parametrize("skew", [0, 1])
def test_a_coefficient_that_is_not_finite_writes_the_amax_alone(
    coef: float, master: str, copy: str | None, skew: int
) -> None:
    update = Update(SIZES, "bf16", master, "fp32", "bf16", copy, clip_coef=coef)
    outs = run_kernel(KERNELS, update.op, update.contents, skew=skew)
    for value, out, expected in zip(update.op.outs, outs, update.reference(), strict=True):
        if value in update.contents:
            assert same_bits(out, update.contents[value]), value
        elif value.name.startswith("amax"):
            assert same_bits(out, expected), value
        else:
            assert out.isnan().all(), f"{value!r} was written"  # as poisoned


def test_a_captured_step_reads_its_scalars_when_it_runs() -> None:
    update = Update([20_000, 9], "fp32", "bf16", "bf16", "bf16")
    binding = bind_kernel(KERNELS, update.op, update.contents)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        binding.launch(torch.cuda.current_stream().cuda_stream)
    later: Mapping[str, Tensor] = {
        "clip_coef": torch.tensor(0.25),
        "lr": torch.tensor(1e-2),
        "step": torch.tensor(123, dtype=torch.int32),
        "seed": torch.tensor(-5),
    }
    for value in (CLIP_COEF, LR, STEP, SEED):
        binding.buffers[value].tensor.copy_(later[value.name])
    graph.replay()
    torch.cuda.synchronize()
    outs = [binding.buffers[out].tensor.cpu() for out in update.op.outs]
    update.check(outs, update.reference(**later))


def test_errors_name_the_invalid_argument() -> None:
    from surogate_optim_adamw import _C

    x = torch.zeros(64, device="cuda", dtype=torch.int64)
    p, stream = x.data_ptr(), torch.cuda.current_stream().cuda_stream
    with pytest.raises(ValueError, match="adamw: lr is a null pointer"):
        _C.adamw(p, p, 0, p, p, p, 512, 1, 1, 8, 0.9, 0.999, 1e-8, stream)
    with pytest.raises(ValueError, match="adamw: beta2 must be in"):
        _C.adamw(p, p, p, p, p, p, 512, 1, 1, 8, 0.9, 1.0, 1e-8, stream)
    with pytest.raises(ValueError, match="adamw: workspace must have"):
        _C.adamw(p, p, p, p, p, p, 8, 1, 1, 8, 0.9, 0.999, 1e-8, stream)
    for size in (4, 24, 1 << 20):
        with pytest.raises(ValueError, match=f"adamw: chunk_size must be a power of two .*, got {size}"):
            _C.adamw(p, p, p, p, p, p, 512, 1, 1, size, 0.9, 0.999, 1e-8, stream)
