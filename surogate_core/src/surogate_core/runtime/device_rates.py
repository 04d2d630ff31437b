"""Measures the rates of the device table on this machine's GPU, by micro-benchmarks alone: no training step is run.

A GPU that is limited by its power lowers its clock after a fraction of a second of matrix products, and a training step
of a large model runs at that clock. So products run until the clock has settled before they are timed; the rates of a
few, at the clock before, are reported for comparison. Operands are random: products of zeros take less power and 13 to
18 % less time (one H200).

    products   the nine products of a block of two widths, forward and backward: FLOPs of all over time of all, in FP8
               without that of writing the outputs
    copy       reads and writes of device memory
    host       copies to and from pinned memory; `host_bandwidth` is that of one direction while both are busy
    launch     an op is two kernels of a captured graph, as most ops are, each waiting for the one before
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import date

import torch
from torch import Tensor

from ..machine.measured_rates import MeasuredRates
from ..machine.prices import GPU

Clock = Callable[[Callable[[], object], float, float], float]
"""(work, settle, seconds) -> seconds that `work` takes, repeated for `settle` seconds and then timed for `seconds`."""

_Shape = tuple[int, int, int]

_KERNELS = 1000
_KERNELS_OF_AN_OP = 2


@dataclass(frozen=True)
class Sizes:
    """Sizes of the loads.

    tokens        rows of the products
    widths        (width, width of the feed-forward part) of the blocks
    copy_bytes    of a copy in device memory, and of one from or to the host
    settle        seconds that products run before they are timed
    seconds       seconds for which each load is timed
    """

    tokens: int = 8192
    widths: tuple[tuple[int, int], ...] = ((2048, 6144), (4096, 12288))
    copy_bytes: int = 1 << 28
    settle: float = 2.0
    seconds: float = 1.0


@dataclass(frozen=True)
class Reading:
    """A rate that was measured. unit: "FLOP/s", "B/s" or "s"."""

    name: str
    rate: float
    unit: str


def measure_rates(
    title: str, device: torch.device, clock: Clock, sizes: Sizes, report: Callable[[Reading], None]
) -> MeasuredRates:
    """Return the rates of `device`, a card with the name `title`. `report` is called with each reading.

    Takes about 30 s with the default sizes, and 3 GiB of the device's memory.
    """
    bandwidth = _copy(device, clock, sizes)
    report(Reading("copy in device memory", bandwidth, "B/s"))
    flops = {dtype: _products(dtype, device, clock, sizes, bandwidth, report) for dtype in ("bf16", "fp8", "fp32")}
    rates = dict(_host_copies(device, clock, sizes))
    for name, rate in rates.items():
        report(Reading(name, rate, "B/s"))
    launch = _launch(device, clock, sizes)
    report(Reading("an op in a captured graph", launch, "s"))
    return MeasuredRates(
        title=title,
        date=date.today().isoformat(),
        flops={dtype: rate for dtype, rate in flops.items() if rate},
        bandwidth=bandwidth,
        launch_seconds=launch,
        host_bandwidth=rates["both at once, each"],
    )


def gpu_clock(work: Callable[[], object], settle: float, seconds: float) -> float:
    """Time `work` on the current stream of the GPU; see `Clock`."""
    work()
    one = _timed(work, 3)
    if settle:
        _timed(work, max(1, int(settle / one)))
    return _timed(work, max(3, int(seconds / one)))


def _timed(work: Callable[[], object], count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(count):
        work()
    end.record()
    end.synchronize()
    return max(start.elapsed_time(end) / 1000 / count, 1e-9)


# ------------------------------------------------------------------------------------------------------------- products


def _products(
    dtype: str,
    device: torch.device,
    clock: Clock,
    sizes: Sizes,
    bandwidth: float,
    report: Callable[[Reading], None],
) -> float | None:
    """Return FLOP/s over the products of all widths; None if the device has no products in FP8.

    The loop of an FP8 product is too short to hide the write of its output, which plans price by itself. So its time is
    taken off.
    """
    total_flops = total_seconds = 0.0
    written_per_second = bandwidth * GPU.memory
    for width, inner in sizes.widths:
        shapes = list(_shapes(sizes.tokens, width, inner))
        try:
            multiply = _multiplier(dtype, shapes, device)
            multiply(*shapes[0])
        except (RuntimeError, AttributeError, TypeError):
            if dtype != "fp8":
                raise
            return None  # the device, or this torch, has none

        def block(shapes: list[_Shape] = shapes, multiply: Callable[..., object] = multiply) -> None:
            for shape in shapes:
                multiply(*shape)

        flops = sum(2 * m * n * k for m, n, k in shapes)
        report(Reading(f"{dtype} products, width {width}, short", flops / clock(block, 0.0, 0.0), "FLOP/s"))
        settled = clock(block, sizes.settle, sizes.seconds)
        report(Reading(f"{dtype} products, width {width}, sustained", flops / settled, "FLOP/s"))
        written = sum(2 * m * n for m, n, _ in shapes) if dtype == "fp8" else 0
        total_flops, total_seconds = total_flops + flops, total_seconds + settled - written / written_per_second
    return total_flops / total_seconds


def _shapes(tokens: int, width: int, inner: int) -> Iterator[_Shape]:
    """Yield (m, n, k) of the products of a block: qkv, gate and up, down; forward, input and weight gradients."""
    for n, k in ((width * 3 // 2, width), (2 * inner, width), (width, inner)):
        yield from ((tokens, n, k), (tokens, k, n), (n, k, tokens))


def _multiplier(dtype: str, shapes: list[_Shape], device: torch.device) -> Callable[[int, int, int], object]:
    """Return a function that multiplies [m, k] by the transpose of [n, k], on random operands that products share."""
    a = _random(max(m * k for m, _, k in shapes), dtype, device)
    b = _random(max(n * k for _, n, k in shapes), dtype, device)
    scale = torch.ones((), device=device)
    out_dtype = torch.float32 if dtype == "fp32" else torch.bfloat16
    outs = torch.empty(max(m * n for m, n, _ in shapes), dtype=out_dtype, device=device)

    def multiply(m: int, n: int, k: int) -> object:
        left, right = a[: m * k].view(m, k), b[: n * k].view(n, k).t()
        if dtype == "fp8":
            out = outs[: m * n].view(m, n)
            return torch._scaled_mm(left, right, scale, scale, out_dtype=out_dtype, use_fast_accum=True, out=out)
        return torch.mm(left, right, out=outs[: m * n].view(m, n))

    return multiply


def _random(count: int, dtype: str, device: torch.device) -> Tensor:
    stored = {"bf16": torch.bfloat16, "fp32": torch.float32, "fp8": torch.float8_e4m3fn}[dtype]
    random = torch.randn(count, dtype=torch.float32 if dtype == "fp32" else torch.bfloat16, device=device)
    return random.to(stored)


# -------------------------------------------------------------------------------------------------- copies and launches


def _copy(device: torch.device, clock: Clock, sizes: Sizes) -> float:
    source, target = (torch.zeros(sizes.copy_bytes, dtype=torch.uint8, device=device) for _ in range(2))
    return 2 * sizes.copy_bytes / clock(lambda: target.copy_(source), 0.0, sizes.seconds)


def _host_copies(device: torch.device, clock: Clock, sizes: Sizes) -> Iterator[tuple[str, float]]:
    """Yield name and bytes/s of copies to the host, from it, and of one direction while both are busy."""
    on_gpu, count = device.type == "cuda", sizes.copy_bytes
    hosts = [torch.zeros(count, dtype=torch.uint8, pin_memory=on_gpu) for _ in range(2)]
    devices = [torch.zeros(count, dtype=torch.uint8, device=device) for _ in range(2)]
    side = torch.cuda.Stream(device) if on_gpu else None

    def down() -> None:
        hosts[0].copy_(devices[0], non_blocking=True)

    def up() -> None:
        devices[1].copy_(hosts[1], non_blocking=True)

    def both() -> None:
        if side is None:
            down()
            up()
            return
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            down()
        up()
        torch.cuda.current_stream().wait_stream(side)

    yield "device to host", count / clock(down, 0.0, sizes.seconds / 2)
    yield "host to device", count / clock(up, 0.0, sizes.seconds / 2)
    yield "both at once, each", count / clock(both, 0.0, sizes.seconds / 2)


def _launch(device: torch.device, clock: Clock, sizes: Sizes) -> float:
    """Return the seconds of an op beside its arithmetic and traffic: those of its kernels on one small tensor."""
    small = torch.zeros(128, device=device)

    def kernels() -> None:
        for _ in range(_KERNELS):
            small.add_(1.0)

    work: Callable[[], object] = kernels
    if device.type == "cuda":
        kernels()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kernels()
        work = graph.replay
    return _KERNELS_OF_AN_OP * clock(work, 0.0, sizes.seconds / 2) / _KERNELS
