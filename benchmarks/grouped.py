"""Times the kernels of a mixture of experts: milliseconds, TFLOP/s and ratios, or GB/s, for random routes.

    python benchmarks/grouped.py [tokens ...]

Shapes are those of Qwen3-30B-A3B (128 experts of 768, 8 a token, model width 2,048), 4,096 and 16,384 tokens without
arguments. Products: by CUTLASS (on an SM90), by mma.sync, torch's grouped_mm and one dense product of the same rows and
widths (of wgrad: one matrix, not 128; torch's results are bf16). "share": the rate of the first of ours, of that of
the dense one. On an SM90 then FP8 products, forward with fast sums and dgrad with exact ones, beside dense FP8 products
by cuBLASLt; "of bf16": times as fast as ours in bf16. "with adapters of rank 16": the sum of a product and such a
branch, by one kernel on an SM90 and by two. "A and B": those of these adapters, with the bytes that they must move, by
their own kernel and by that of wide weights. "bias": forward products without and with one of each expert, in turns.
Before all of them the ops around them; "clamped": with the gate of gpt-oss. Medians of replayed CUDA graphs.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from surogate_core.api import KernelDef, Op, Value
from surogate_core.testing.binding import bind_kernel
from surogate_models_moe.kernels import KERNELS, grouped
from surogate_models_moe.ops import OPS
from surogate_recipes_fp8.kernels import KERNELS as FP8_KERNELS
from surogate_recipes_fp8.ops import OPS as FP8_OPS

EXPERTS, K, WIDTH, HIDDEN = 128, 8, 2048, 768
WEIGHTS = {"gate_up": (2 * HIDDEN, WIDTH), "down": (WIDTH, HIDDEN)}
DEFINITIONS = {definition.kind: definition for definition in (*OPS, *FP8_OPS)}
WGRAD = "grouped_linear_wgrad"
PRODUCTS = (("grouped_linear", "bf16"), ("grouped_linear_dgrad", "bf16"), (WGRAD, "fp32"), (WGRAD, "bf16"))
GATES: dict[str, dict[str, Any]] = {
    "": {},
    ", clamped": {"alpha": 1.702, "limit": 7.0, "offset": 1.0, "interleaved": True},
}
"""What a line adds to the name of an op, and the attributes."""
FP8 = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
LAUNCHES, REPLAYS = 5, 7


def milliseconds(launch: Callable[[], object]) -> float:
    """Return the median time of a launch inside of a graph of several."""
    launch()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(LAUNCHES):
            launch()
    times = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(begin.elapsed_time(end) / LAUNCHES)
    return statistics.median(times[1:])


def bound(
    kernels: Sequence[KernelDef], kind: str, ins: Mapping[str, Tensor], written: str = "", **attrs: object
) -> tuple[Callable[[], object], list[Tensor]]:
    """Return a launch of an op and its outputs, in the dtype `written` if it is not the usual one."""
    names = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "int32"}
    names |= {dtype: name for name, dtype in FP8.items()}
    values = {Value(n, tuple(x.shape), names[x.dtype], "act"): x for n, x in ins.items()}
    specs = DEFINITIONS[kind].infer(tuple(values), attrs)
    outs = tuple(Value(spec.label, spec.shape, written or spec.dtype, "act") for spec in specs)
    binding = bind_kernel(kernels, Op(kind, tuple(values), outs, dict(attrs)), values)

    def launch() -> None:
        binding.launch(torch.cuda.current_stream().cuda_stream)

    launch()
    return launch, [binding.buffers[out].tensor for out in outs]


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def torch_product(kind: str, a: Tensor, b: Tensor, ends: Tensor) -> Callable[[], Tensor] | None:
    """Return torch's product of the same groups, if it has one."""
    product = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    if product is None:
        return None
    if kind == "grouped_linear_wgrad":
        return lambda: product(a.T, b, offs=ends)
    weights = b.view(EXPERTS, -1, b.shape[1])
    weights = weights if kind == "grouped_linear_dgrad" else weights.transpose(1, 2)
    return lambda: product(a, weights, offs=ends)


def products(tokens: int, ends: Tensor, is_sm90: bool) -> dict[str, float]:
    """Print products in bf16. Return the time of the first of ours of each."""
    found: dict[str, float] = {}
    rows = tokens * K
    print(f"\n{tokens} tokens, {rows} rows, {int(ends.diff(prepend=ends.new_zeros(1)).max())} of one expert at most")
    print(f"{'':30}{'cutlass':>16}{'mma.sync':>16}{'torch':>16}{'dense':>16}  share  of torch")
    for name, (n, k) in WEIGHTS.items():
        for kind, dtype in PRODUCTS:
            a = bf16(rows, k if kind == "grouped_linear" else n)
            b = bf16(rows, k) if kind.endswith("wgrad") else bf16(EXPERTS * n, k)
            ours = [
                milliseconds(bound(kernels, kind, {"a": a, "b": b, "ends": ends}, dtype)[0])
                for kernels in (*([grouped.CUTLASS] if is_sm90 else []), grouped.PORTABLE)
            ]
            peer = torch_product(kind, a, b, ends)
            theirs = milliseconds(peer) if peer else None
            one = b if kind.endswith("wgrad") else b[:n] if kind.endswith("dgrad") else b[:n].T
            left = a.T if kind.endswith("wgrad") else a
            dense = milliseconds(lambda left=left, one=one: left @ one)
            flops = 2 * rows * n * k
            cells = [*([] if is_sm90 else [None]), *ours, theirs, dense]
            texts = [f"{ms:7.3f} {flops / ms / 1e9:4.0f} TF/s"[:16] if ms else "-" for ms in cells]
            ratio = f"{theirs / ours[0]:6.2f}" if theirs else ""
            label = f"{name} {kind.removeprefix('grouped_linear').strip('_') or 'forward'}"
            found[label] = ours[0]
            print(f"{f'{label} {dtype}':30}", *(f"{t:>15}" for t in texts), end="")
            print(f" {dense / ours[0]:6.2f} {ratio}")
    return found


def in_turn(*launches: Callable[[], object]) -> None:
    for launch in launches:
        launch()


def pairs(tokens: int, ends: Tensor, is_sm90: bool) -> None:
    """Print products with the branches of adapters."""
    rows = tokens * K
    print(f"\n{'with adapters of rank 16':30}{'one kernel':>16}{'two':>16}")
    for name, (n, k) in WEIGHTS.items():
        for label, kind, terms, width in (("forward", PRODUCTS[0][0], k, n), ("dgrad", PRODUCTS[1][0], n, k)):
            up = (EXPERTS * 16, width) if label == "dgrad" else (EXPERTS * width, 16)
            first, second = (bf16(rows, terms), bf16(EXPERTS * n, k)), (bf16(rows, 16), bf16(*up))
            product = dict(zip(("x", "w"), first, strict=True)) | {"ends": ends}
            branch = dict(zip(("x2", "w2"), second, strict=True))
            cells = [milliseconds(bound(grouped.ONE_KERNEL, f"{kind}_pair", product | branch)[0]) if is_sm90 else None]
            kernels = grouped.CUTLASS if is_sm90 else grouped.PORTABLE
            launch, (base,) = bound(kernels, kind, product)
            add = bound(grouped.THIN, f"{kind}_add", branch | {"ends": ends, "base": base})[0]
            cells.append(milliseconds(partial(in_turn, launch, add)))
            print(f"{f'{name} {label}':30}", *(f"{f'{ms:.3f} ms' if ms else '-':>15}" for ms in cells))


def of_adapters(tokens: int, ends: Tensor, is_sm90: bool) -> None:
    """Print products of A and B alone, and their gradients in fp32."""
    rows, kernels = tokens * K, grouped.CUTLASS if is_sm90 else grouped.PORTABLE
    print(f"\n{'A and B of rank 16':30}{'narrow':>26}{'wide':>10}")
    for name, (n, k) in WEIGHTS.items():
        down, up, inner, x, dy = (EXPERTS * 16, k), (EXPERTS * n, 16), (rows, 16), (rows, k), (rows, n)
        for label, kind, a, b, out in (
            ("x A", PRODUCTS[0][0], x, down, inner),
            ("dy B", PRODUCTS[1][0], dy, up, inner),
            ("dA", WGRAD, inner, x, down),
            ("dB", WGRAD, dy, inner, up),
        ):
            ins, dtype = {"a": bf16(*a), "b": bf16(*b), "ends": ends}, "fp32" if kind == WGRAD else "bf16"
            ms, wide = (milliseconds(bound(of, kind, ins, dtype)[0]) for of in (grouped.NARROW, kernels))
            nbytes = 2 * (ins["a"].numel() + ins["b"].numel()) + (4 if kind == WGRAD else 2) * out[0] * out[1]
            print(f"{f'{name} {label}':30}{1000 * ms:9.1f} us {nbytes / ms / 1e6:8.0f} GB/s{1000 * wide:7.1f} us")


def biases(tokens: int, ends: Tensor, is_sm90: bool) -> None:
    """Print forward products without and with a bias: the medians of three times in turns."""
    rows, one = tokens * K, torch.ones(2, device="cuda")
    print(f"\n{'bias':30}{'without':>16}{'with':>16}  ratio")
    for name, (n, k) in WEIGHTS.items():
        x, w, bias = bf16(rows, k), bf16(EXPERTS * n, k), bf16(EXPERTS, n)
        plain = {"x": x, "w": w, "ends": ends}
        ways: dict[str, tuple[Sequence[KernelDef], str, dict[str, Tensor], dict[str, Any]]]
        kernels = (*grouped.CUTLASS, grouped.BIASED_CUTLASS, *grouped.PORTABLE, grouped.BIASED_PORTABLE)
        ways = {"bf16": (kernels, "grouped_linear", plain, {})}
        for weight in ("e4m3", "e5m2") if is_sm90 else ():
            codes = {
                "a": x.to(FP8["e4m3"]),
                "b": w.to(FP8[weight]),
                "scale_a": one,
                "scale_b": one.clone(),
                "ends": ends,
            }
            ways[weight] = (FP8_KERNELS, "fp8_grouped_linear", codes, {"fast": True, "beside": False})
        for way, (kernels, kind, ins, attrs) in ways.items():
            launches = [bound(kernels, kind, ins | more, **attrs)[0] for more in ({}, {"bias": bias})]
            without, with_ = zip(*([milliseconds(launch) for launch in launches] for _ in range(3)), strict=True)
            times = (statistics.median(without), statistics.median(with_))
            print(f"{f'{name} {way}':30}", *(f"{f'{ms:.3f} ms':>15}" for ms in times), f"{times[1] / times[0]:6.3f}")


def fp8_products(tokens: int, ends: Tensor, of_bf16: Mapping[str, float]) -> None:
    rows, scales = tokens * K, {name: torch.ones(2, device="cuda") for name in ("scale_a", "scale_b")}
    print(f"\n{'FP8':30}{'cutlass':>16}{'dense':>16}  share  of bf16{'with adapters':>15}")
    for name, (n, k) in WEIGHTS.items():
        for label, dtype, fast in ((f"{name} forward", "e4m3", True), (f"{name} dgrad", "e5m2", False)):
            terms, width = (k, n) if fast else (n, k)
            a, one = bf16(rows, terms).to(FP8[dtype]), bf16(width, terms).to(FP8["e4m3"])
            b = (bf16(EXPERTS * n, k) if fast else bf16(k, EXPERTS * n)).to(FP8["e4m3"])
            ins, attrs = {"a": a, "b": b, **scales, "ends": ends}, {"fast": fast, "beside": not fast}
            ours = milliseconds(bound(FP8_KERNELS, "fp8_grouped_linear", ins, **attrs)[0])
            plain = {"a": a, "b": one, **scales}
            dense = milliseconds(bound(FP8_KERNELS, "fp8_linear", plain, dtype="bf16", fast=fast)[0])
            texts = [f"{ms:7.3f} {2 * rows * n * k / ms / 1e9:4.0f} TF/s" for ms in (ours, dense)]
            print(f"{f'{label} {dtype}':30}", *(f"{t:>15}" for t in texts), end="")
            second = {"a2": bf16(rows, 16), "b2": bf16(EXPERTS * width, 16).view(-1, 16 if fast else width)}
            pair = milliseconds(bound(FP8_KERNELS, "fp8_grouped_linear", ins | second, **attrs)[0])
            print(f" {dense / ours:6.2f} {of_bf16[label] / ours:7.2f} {pair:11.3f} ms")


def others(tokens: int, is_sm90: bool) -> Tensor:
    """Print the ops around the products. Return the ends of the groups."""
    rows = tokens * K
    route, (weights, experts) = bound(KERNELS, "route", {"logits": bf16(tokens, EXPERTS)}, k=K, normalize=True)
    sort, (order, place, ends) = bound(KERNELS, "expert_order", {"experts": experts}, n_experts=EXPERTS)
    ordered = {"order": order, "place": place}
    x, y = bf16(tokens, WIDTH), bf16(rows, WIDTH)
    gate_up, dy, factors = bf16(rows, 2 * HIDDEN), bf16(rows, HIDDEN), {"weights": weights, "order": order}
    back = {"d_weights": weights, "logits": bf16(tokens, EXPERTS), "experts": experts}
    swiglu = {"gate_up": gate_up, **factors}
    ops = {
        "route": (route, tokens * (2 * EXPERTS + 8 * K)),
        "route_bwd": (bound(KERNELS, "route_bwd", back, normalize=True)[0], tokens * (2 * EXPERTS + 12 * K)),
        "expert_order": (sort, 16 * rows),
        "gather_rows": (bound(KERNELS, "gather_rows", {"x": x, **ordered})[0], 2 * WIDTH * (rows + tokens)),
        "sum_rows": (bound(KERNELS, "sum_rows", {"y": y, **ordered}, k=K)[0], 2 * WIDTH * (rows + tokens)),
    }
    state = {"scale": torch.ones(2, device="cuda"), "amax": torch.zeros(2, device="cuda")}

    def codes(kind: str, ins: Mapping[str, Tensor], dtype: str, **attrs: Any) -> Callable[[], object]:
        return bound(FP8_KERNELS, kind, {**ins, **state}, dtype=dtype, scaling="delayed", **attrs)[0]

    for form, attrs in GATES.items():
        for kind, ins, of_element, dtype, of_codes in (
            ("weighted_swiglu", swiglu, 6, "e4m3", 5),
            ("weighted_swiglu_bwd", {"dy": dy, **swiglu}, 10, "e5m2", 8),
        ):
            ops[f"{kind}{form}"] = (bound(KERNELS, kind, ins, **attrs)[0], of_element * HIDDEN * rows)
            if is_sm90:  # what writes the codes of FP8 products, in place of the gate and a pass over what it writes
                launch = codes(f"fp8_{kind}", ins, dtype, **attrs)
                ops[f"fp8_{kind}{form}"] = (launch, of_codes * HIDDEN * rows)
    if is_sm90:
        ops["fp8_quantize, swiglu"] = (codes("fp8_quantize", {"x": dy}, "e4m3"), 3 * HIDDEN * rows)
        ops["fp8_quantize, d_gate_up"] = (codes("fp8_quantize", {"x": gate_up}, "e5m2"), 6 * HIDDEN * rows)
    large = bf16(rows * WIDTH)
    copy = torch.empty_like(large)
    ops["copy, for comparison"] = (lambda: copy.copy_(large), 4 * large.numel())
    print(f"\n{tokens} tokens")
    for name, (launch, nbytes) in ops.items():
        ms = milliseconds(launch)
        print(f"{name:33}{1000 * ms:9.1f} us {nbytes / ms / 1e6:8.0f} GB/s")
    return ends.clone()


def main() -> None:
    major, minor = torch.cuda.get_device_capability()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}")
    torch.manual_seed(0)
    is_sm90 = (major, minor) == (9, 0)
    for tokens in [int(argument) for argument in sys.argv[1:]] or [4096, 16384]:
        ends = others(tokens, is_sm90)
        of_bf16 = products(tokens, ends, is_sm90)
        pairs(tokens, ends, is_sm90)
        of_adapters(tokens, ends, is_sm90)
        biases(tokens, ends, is_sm90)
        if is_sm90:
            fp8_products(tokens, ends, of_bf16)
        torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
