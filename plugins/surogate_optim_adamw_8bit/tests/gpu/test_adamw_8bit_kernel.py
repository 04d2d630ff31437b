"""The compiled adamw_8bit is bit-identical to the reference: codes, scales and masters, for any dtypes and any size."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from sharding.parts import divided, firsts, joined, placed
from torch import Tensor

from surogate_core.api import Op, Place, Value, part_size
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.binding import bind_kernel, run_kernel
from surogate_core.testing.kernels import plain_nan, same_bits
from surogate_optim_adamw_8bit.codes import BLOCK, ZERO
from surogate_optim_adamw_8bit.kernels import CHUNK_SIZE, KERNELS, code_words
from surogate_optim_adamw_8bit.reference import adamw_8bit, encoded

pytestmark = pytest.mark.gpu

CLIP_COEF = Value(name="clip_coef", shape=(), dtype="fp32", role="act")
LR = Value(name="lr", shape=(), dtype="fp32", role="input")
STEP = Value(name="step", shape=(), dtype="int32", role="input")
SEED = Value(name="seed", shape=(), dtype="int64", role="input")

SIZES = [1, 7, 8, 9, 255, 256, 257, 2049, CHUNK_SIZE - 1, CHUNK_SIZE, CHUNK_SIZE + 1, 3 * CHUNK_SIZE + 5]
DTYPES = ("fp32", "bf16")


@pytest.fixture(autouse=True)
def exact_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a CPU, torch computes fp32 square roots with a vector library, some with an error of one unit. The kernel's
    are exact, and so is a root in fp64 that is then rounded.
    """
    root = Tensor.sqrt
    monkeypatch.setattr(Tensor, "sqrt", lambda x: root(x.double()).to(x.dtype))


class Update:
    """An `adamw_8bit` op over vectors, and the contents of its inputs. Every third tensor has fp32 moments."""

    def __init__(
        self,
        sizes: Sequence[int],
        grad: str = "fp32",
        master: str = "fp32",
        copy: str | None = None,
        *,
        quantized: Sequence[int] | None = None,
        scale: float = 0.1,
        clip_coef: float = 0.7,
        lr: float = 3e-4,
        step: int = 7,
        seed: int = 1234567890123,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        place: Place = "device",
    ) -> None:
        n = len(sizes)
        coded = tuple(i for i in range(n) if i % 3 != 1) if quantized is None else tuple(quantized)
        gen = torch.Generator().manual_seed(n)
        self.contents: dict[Value, Tensor] = {
            CLIP_COEF: torch.tensor(clip_coef),
            LR: torch.tensor(lr),
            STEP: torch.tensor(step, dtype=torch.int32),
            SEED: torch.tensor(seed),
        }

        def value(name: str, content: Tensor, dtype: str) -> Value:
            v = Value(name=name, shape=tuple(content.shape), dtype=dtype, role="state", place=place)
            self.contents[v] = content.to(TORCH_DTYPES[dtype])
            return v

        grads = [value(f"g{i}", scale * torch.randn(s, generator=gen), grad) for i, s in enumerate(sizes)]
        masters = [value(f"p{i}", torch.randn(s, generator=gen) * 0.1, master) for i, s in enumerate(sizes)]
        columns: dict[str, list[Value]] = {"m": [], "v": []}
        scales: dict[str, list[Value]] = {"m": [], "v": []}
        for i, s in enumerate(sizes):
            for name, signed in (("m", True), ("v", False)):
                x = scale * torch.randn(s, generator=gen)
                x = x if signed else x.square()
                if i not in coded:
                    columns[name].append(value(f"{name}{i}", x, "fp32"))
                    continue
                codes, top = encoded(x, signed=signed)
                columns[name].append(value(f"{name}{i}", codes, "uint8"))
                scales[name].append(value(f"{name}_scale{i}", top, "fp32"))
        copied = tuple(i for i in range(n) if i % 3 != 2) if copy else ()
        copies = [Value(name=f"copy{i}", shape=(sizes[i],), dtype=copy or "", role="param") for i in copied]
        measured = tuple(i for i in range(n) if i % 4 != 1)
        amaxes = [Value(name=f"amax{i}", shape=(), dtype="fp32", role="act") for i in measured]
        self.attrs: dict[str, Any] = {
            "n": n,
            "quantized": coded,
            "copied": copied,
            "copy_dtypes": tuple(c.dtype for c in copies),
            "measured": measured,
            "weight_decay": tuple(0.1 * (i % 2) for i in range(n)),
            "streams": tuple((0x9ABCDEF1 * (i + 1)) & 0xFFFFFFFF for i in range(n)),
            "beta1": beta1,
            "beta2": beta2,
            "epsilon": epsilon,
        }
        kept = (*masters, *columns["m"], *columns["v"], *scales["m"], *scales["v"])
        self.op = Op("adamw_8bit", (CLIP_COEF, LR, STEP, SEED, *grads, *kept), (*kept, *copies, *amaxes), self.attrs)

    def named(self, name: str) -> Tensor:
        return next(content for value, content in self.contents.items() if value.name == name)

    def reference(self, *, firsts: Sequence[int] = (), **scalars: Tensor) -> tuple[Tensor, ...]:
        return adamw_8bit(*(scalars.get(v.name, self.contents[v]) for v in self.op.ins), **self.attrs, firsts=firsts)

    def check(self, outs: Sequence[Tensor], theirs: Sequence[Tensor]) -> None:
        """Check without tolerance. Only the bits of NaN may differ."""
        for value, a, b in zip(self.op.outs, map(plain_nan, outs), map(plain_nan, theirs), strict=True):
            wrong = int((a.double() != b.double()).sum())
            assert same_bits(a, b), f"{value!r}: {wrong} elements differ, by {(a.double() - b.double()).abs().max()}"

    def run(self, **settings: int) -> None:
        self.check(run_kernel(KERNELS, self.op, self.contents, **settings), self.reference())


@pytest.mark.parametrize(("grad", "master", "copy"), list(product(DTYPES, DTYPES, (None, *DTYPES))))
@pytest.mark.parametrize("place", ["device", "host"])
def test_a_step_is_bit_identical_to_the_reference(grad: str, master: str, copy: str | None, place: Place) -> None:
    """The buffers are on the device: it is the place of the values that chooses the accesses."""
    Update(SIZES, grad, master, copy, place=place).run()


@pytest.mark.parametrize("dtype", DTYPES)
def test_unaligned_buffers_are_bit_identical_to_the_reference(dtype: str) -> None:
    Update(SIZES, dtype, dtype, "bf16").run(skew=1)


def test_more_tensors_than_threads_per_block_are_bit_identical_to_the_reference() -> None:
    Update([1 + 37 * i for i in range(700)], "bf16", "bf16").run()


def test_more_chunks_than_resident_blocks_are_bit_identical_to_the_reference() -> None:
    """A block of the grid then updates several chunks, of different tensors."""
    Update([CHUNK_SIZE * 200 + 77, 4096, CHUNK_SIZE * 120], "bf16", "bf16", quantized=(0, 2)).run()


@pytest.mark.parametrize("step", [1, 2, 1000, 10**6])
@pytest.mark.parametrize("seed", [0, -1, (1 << 63) - 1])
def test_any_step_and_seed_are_bit_identical_to_the_reference(step: int, seed: int) -> None:
    Update([1000, 513], "bf16", "bf16", step=step, seed=seed, lr=0.02).run()


@pytest.mark.parametrize("parts", [2, 3, 4])
@pytest.mark.parametrize(("grad", "master"), list(product(DTYPES, DTYPES)))
@pytest.mark.parametrize("place", ["device", "host"])
def test_the_parts_of_a_step_have_the_bits_of_the_whole(parts: int, grad: str, master: str, place: Place) -> None:
    """Parts begin at any multiple of 256 elements, inside the chunks of the kernel too. The last may be all padding."""
    sizes = [300, 5000, 3 * CHUNK_SIZE + 5, 300_001]
    update = Update(sizes, grad, master, "bf16", place=place)
    whole = dict(zip(update.op.outs, run_kernel(KERNELS, update.op, update.contents), strict=True))

    def size(value: Value) -> int:
        """A scale is that of a block of elements."""
        elements = part_size(sizes[int(value.name[-1])], parts)
        return elements // BLOCK if "scale" in value.name else elements

    def padding(value: Value) -> int:
        return ZERO if value.dtype == "uint8" and value.name.startswith("m") else 0

    ranks = [
        run_kernel(KERNELS, op, contents, rank=rank)
        for rank, (op, contents) in enumerate(divided(update.op, update.contents, parts, size, padding))
    ]
    for value, found in joined(update.op, ranks):
        assert same_bits(found, whole[value]), value


@pytest.mark.parametrize("skew", [0, 1])
def test_the_random_bits_of_a_part_that_begins_beyond_2_to_the_35_are_the_references(skew: int) -> None:
    """There the second word of the Philox counter is not 0."""
    update = Update([1 << 16, 2049], "bf16", "bf16")
    rank = (1 << 20) + 3
    update.op, update.contents = placed(update.op, update.contents, 1 << 16, rank)
    begins = firsts(update.op, rank)
    assert begins[:2] == (rank << 16, 0) and rank << 16 > 1 << 35
    outs = run_kernel(KERNELS, update.op, update.contents, skew=skew, rank=rank)
    update.check(outs, update.reference(firsts=begins))


@pytest.mark.parametrize("scale", [1e-30, 1e-20, 1e-13, 1e-9, 1e-5, 1.0, 1e10, 1e18, 1e25])
def test_gradients_of_any_size_are_bit_identical_to_the_reference(scale: float) -> None:
    """Scales below 2^-70 and above 2^26 take the slow path. The largest gradients overflow the second moment."""
    Update([4096, 4096, 5000], scale=scale).run()


def test_zeros_and_a_wide_range_within_a_block_are_bit_identical_to_the_reference() -> None:
    """Codes at every distance from the scale of the block, blocks of zeros, single elements that are not zero."""
    update = Update([64 * BLOCK] * 3, quantized=(0, 1, 2))
    span = torch.logspace(-12, 0, 64 * BLOCK)
    update.named("g0").mul_(span[torch.randperm(64 * BLOCK, generator=torch.Generator().manual_seed(1))])
    for name in ("g1", "m1", "v1", "m_scale1", "v_scale1"):
        update.named(name).zero_()
    update.named("m1").fill_(127)
    update.named("g1")[1000] = -1e-3
    update.named("g2")[::2] = 0.0
    update.run()


@pytest.mark.parametrize("special", [torch.inf, -torch.inf, torch.nan, 3e38, 1e-45, 0.0, -0.0])
@pytest.mark.parametrize("tensor", ["p0", "m_scale0", "v_scale0", "m1", "v1"])
def test_special_values_are_bit_identical_to_the_reference(special: float, tensor: str) -> None:
    update = Update([4 * BLOCK, 4 * BLOCK], quantized=(0,))
    update.named(tensor)[1] = abs(special) if tensor.startswith("v") else special
    update.run()


@pytest.mark.parametrize(
    "scalars",
    [
        {"epsilon": 1e-35},
        {"epsilon": 1e-50},
        {"lr": 0.0},
        {"lr": 1e-30},
        {"lr": 1e20},
        {"beta1": 0.0},
        {"beta2": 0.0},
        {"beta1": 0.3, "beta2": 0.45},
        {"clip_coef": 1e-30},
        {"clip_coef": -1e30},
    ],
    ids=str,
)
@pytest.mark.parametrize("dtype", DTYPES)
def test_any_options_are_bit_identical_to_the_reference(dtype: str, scalars: Mapping[str, Any]) -> None:
    Update([5000, 8], dtype, dtype, **scalars).run()


@pytest.mark.parametrize("coef", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize(("master", "copy"), [("bf16", "fp32"), ("fp32", "bf16"), ("bf16", None), ("fp32", None)])
@pytest.mark.parametrize("skew", [0, 1])
def test_a_coefficient_that_is_not_finite_writes_the_amax_alone(
    coef: float, master: str, copy: str | None, skew: int
) -> None:
    update = Update(SIZES, "bf16", master, copy, clip_coef=coef)
    outs = run_kernel(KERNELS, update.op, update.contents, skew=skew)
    for value, out, expected in zip(update.op.outs, outs, update.reference(), strict=True):
        if value in update.contents:
            assert same_bits(out, update.contents[value]), value
        elif value.name.startswith("amax"):
            assert same_bits(out, expected), value
        else:
            assert out.isnan().all(), f"{value!r} was written"  # as poisoned


def test_a_captured_step_reads_its_scalars_when_it_runs() -> None:
    update = Update([20_000, 9], "fp32", "bf16")
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
    from surogate_optim_adamw_8bit import _C

    x = torch.tensor(code_words(), device="cuda")
    p, stream = x.data_ptr(), torch.cuda.current_stream().cuda_stream
    with pytest.raises(ValueError, match="adamw_8bit: lr is a null pointer"):
        _C.adamw_8bit(p, p, p, 0, p, p, p, 512, 1, 1, 256, 0.9, 0.999, 1e-8, stream)
    with pytest.raises(ValueError, match="adamw_8bit: codes is a null pointer"):
        _C.adamw_8bit(p, 0, p, p, p, p, p, 512, 1, 1, 256, 0.9, 0.999, 1e-8, stream)
    with pytest.raises(ValueError, match="adamw_8bit: beta2 must be in"):
        _C.adamw_8bit(p, p, p, p, p, p, p, 512, 1, 1, 256, 0.9, 1.0, 1e-8, stream)
    with pytest.raises(ValueError, match="adamw_8bit: workspace must have"):
        _C.adamw_8bit(p, p, p, p, p, p, p, 8, 1, 1, 256, 0.9, 0.999, 1e-8, stream)
    for size in (8, 384, 1 << 20):
        with pytest.raises(ValueError, match=f"adamw_8bit: chunk_size must be a power of two .*, got {size}"):
            _C.adamw_8bit(p, p, p, p, p, p, p, 512, 1, 1, size, 0.9, 0.999, 1e-8, stream)
