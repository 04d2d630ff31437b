"""Times how frozen weights of Qwen3-8B are read: microseconds, GB/s and share of the copy rate of this GPU.

    python benchmarks/dequantize.py

A row is a weight of a block, and what is made of it: "bf16", or a copy in E4M3 with one scale for FP8 products, by rows
or transposed. The kernels of several copies of the weight run in one CUDA graph; together they are too large for the
cache. Bytes are those of the stored weight and of the result. The copy rate is that of `torch.Tensor.copy_`, read plus
written. Quantizing, which includes the measuring of the amax, is timed too; it happens once, when a weight is loaded.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import ceil
from typing import Any

import torch

from surogate_core.api import KernelDef, Op, OpDef, Value
from surogate_core.dtypes import DTYPES
from surogate_core.testing.binding import Binding, bind_kernel
from surogate_qlora_fp4 import kernels as fp4_kernels
from surogate_qlora_fp4 import ops as fp4_ops
from surogate_qlora_fp8 import kernels as fp8_kernels
from surogate_qlora_fp8 import ops as fp8_ops
from surogate_qlora_nf4 import kernels as nf4_kernels
from surogate_qlora_nf4 import ops as nf4_ops

SHAPES: Mapping[str, tuple[tuple[int, ...], int]] = {
    "qkv": ((4096, 1024, 1024), 4096),
    "o": ((4096,), 4096),
    "gate_up": ((12288, 12288), 4096),
    "down": ((4096,), 12288),
}
"""Rows of each matrix, and columns."""

TOGETHER = 400e6
"""Bytes that a graph moves at least: eight times the cache of an H200."""

REPLAYS = 12


@dataclass(frozen=True)
class Format:
    """A way to store weights. attrs: of the op that quantizes; kept: those that the op that dequantizes has too."""

    ops: tuple[OpDef, ...]
    kernels: tuple[KernelDef, ...]
    attrs: Mapping[str, Any]
    kept: tuple[str, ...] = ()

    def quantize(self, rows: tuple[int, ...], columns: int) -> Op:
        """Return the op that quantizes a bf16 weight."""
        w = Value(name="w", shape=(sum(rows), columns), dtype="bf16", role="param")
        return _op(self.ops[0], (w,), {"rows": rows, **self.attrs})

    def readers(self, quantize: Op) -> tuple[Op, dict[str, Op]]:
        """Return the op that measures what `quantize` writes, and by their results those that a pass may run."""
        attrs = {name: quantize.attrs[name] for name in ("rows", *self.kept)} | {"dtype": "bf16"}
        if "block" in attrs:
            attrs["shape"] = quantize.ins[0].shape
        _, dequantize, amax, to_e4m3 = self.ops
        measure = _op(amax, quantize.outs, attrs)
        ins = (*quantize.outs, *measure.outs)
        return measure, {
            "bf16": _op(dequantize, quantize.outs, attrs),
            "e4m3": _op(to_e4m3, ins, attrs | {"transposed": False}),
            "e4m3 transposed": _op(to_e4m3, ins, attrs | {"transposed": True}),
        }


def _op(definition: OpDef, ins: tuple[Value, ...], attrs: dict[str, Any]) -> Op:
    specs = definition.infer(ins, attrs)
    outs = tuple(Value(name=spec.label, shape=spec.shape, dtype=spec.dtype, role="act") for spec in specs)
    return Op(definition.kind, ins, outs, attrs)


NF4 = (nf4_ops.OPS, nf4_kernels.KERNELS)
FP8 = (fp8_ops.OPS, fp8_kernels.KERNELS)
FP4 = (fp4_ops.OPS, fp4_kernels.KERNELS)
FORMATS: Mapping[str, Format] = {
    "nf4 double": Format(*NF4, {"block": 64, "double": True}, ("block",)),
    "nf4": Format(*NF4, {"block": 64, "double": False}, ("block",)),
    "fp8 tile 128": Format(*FP8, {"tile": 128}, ("tile",)),
    "fp4 4/6": Format(*FP4, {"four_over_six": True}),
}


def microseconds(launch: Callable[[int], None]) -> float:
    """Return the median time of a replay of the graph of `launch`."""
    launch(torch.cuda.current_stream().cuda_stream)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        launch(torch.cuda.current_stream().cuda_stream)
    times = []
    for _ in range(REPLAYS + 2):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(1000 * begin.elapsed_time(end))
    return statistics.median(times[2:])


def copy_rate() -> float:
    """Return bytes per second, read plus written, of a kernel of torch. In a graph `copy_` uses the copy engine."""
    source, target = (torch.zeros(int(TOGETHER) // 4, dtype=torch.int32, device="cuda") for _ in range(2))
    return 2 * TOGETHER / microseconds(lambda stream: torch.bitwise_not(source, out=target)) * 1e6


def moved(op: Op) -> int:
    """Return the bytes of inputs and outputs."""
    return sum(DTYPES[value.dtype].nbytes(value.size) for value in (*op.ins, *op.outs))


def bound(op: Op, kernels: tuple[KernelDef, ...], contents: Mapping[Value, torch.Tensor], count: int) -> list[Binding]:
    """Return copies of an op, each with buffers of its own."""
    return [bind_kernel(kernels, op, contents) for _ in range(count)]


def time_of(bindings: list[Binding]) -> float:
    """Return microseconds of one."""

    def launch(stream: int) -> None:
        for binding in bindings:
            binding.launch(stream)

    return microseconds(launch) / len(bindings)


def measure(name: str, shape: str, rate: float) -> tuple[list[float], float]:
    """Print the rows of a weight. Return microseconds of each result, and of quantizing."""
    form, (rows, columns) = FORMATS[name], SHAPES[shape]
    quantize = form.quantize(rows, columns)
    w = 0.02 * torch.randn(quantize.ins[0].shape, device="cuda", dtype=torch.bfloat16)
    (first,) = bound(quantize, form.kernels, {quantize.ins[0]: w}, 1)
    quantizing = time_of([first])
    contents = {value: first.buffers[value].tensor for value in quantize.outs}
    amax, readers = form.readers(quantize)
    (second,) = bound(amax, form.kernels, contents, 1)
    quantizing += time_of([second])
    contents |= {value: second.buffers[value].tensor for value in amax.outs}
    times = []
    for result, op in readers.items():
        copies = ceil(TOGETHER / moved(op))
        times.append(time_of(bound(op, form.kernels, {value: contents[value] for value in op.ins}, copies)))
        achieved = moved(op) / times[-1] * 1e6
        print(f"{name:14}{shape:10}{result:17}{times[-1]:9.1f}{achieved / 1e9:9.0f}{achieved / rate:9.1%}", flush=True)
    return times, quantizing


def main() -> None:
    """Print the table."""
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, copy {rate / 1e9:.0f} GB/s")
    print(f"{'format':14}{'weight':10}{'result':17}{'us':>9}{'GB/s':>9}{'of copy':>9}")
    for name in FORMATS:
        times, quantizing = zip(*(measure(name, shape, rate) for shape in SHAPES), strict=True)
        bf16, e4m3, transposed = (sum(column) / 1000 for column in zip(*times, strict=True))
        print(
            f"{name:14}a block, ms: bf16 {bf16:.3f}, e4m3 {e4m3:.3f}, transposed {transposed:.3f}; "
            f"quantized once in {sum(quantizing) / 1000:.3f}"
        )


if __name__ == "__main__":
    main()
