"""Times the kernels of a layer with linear attention: microseconds, and GB/s of the bytes that they must move.

    python benchmarks/hybrid.py [--documents 4] [--documents 1] [--value-heads 32]

8,192 tokens, bf16, 16 key and 32 value heads of 128, convolution over 4 tokens: the layer of a Qwen3.5-9B from queries,
keys and values before the convolution to the output behind the gated norm. "layer": the sum of its kernels, forward,
backward, and backward with frozen weights, as under LoRA. The backward pass of the delta rule also as on devices whose
blocks have less shared memory. Then the kernels inside of the delta rule, by CUPTI. Medians of replayed CUDA graphs.
"""

from __future__ import annotations

import argparse
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence

import torch
from grouped import milliseconds
from torch import Tensor

from surogate_core.api import Op, Value
from surogate_core.testing.binding import bind_kernel
from surogate_models_hybrid import kernels
from surogate_models_hybrid.ops import OPS

TOKENS, DIM, TAPS = 8192, 128, 4
DEFINITIONS = {definition.kind: definition for definition in OPS}
DTYPES = {torch.bfloat16: "bf16", torch.float32: "fp32", torch.int32: "int32"}
LAYERS = {
    "forward": ("causal_conv", "gated_delta_rule", "gated_rmsnorm"),
    "backward": ("causal_conv_bwd", "gated_delta_rule_bwd", "gated_rmsnorm_bwd"),
    "backward, frozen weights": ("causal_conv_dgrad", "gated_delta_rule_bwd", "gated_rmsnorm_dgrad"),
}
BLOCKS = {"": 0, " (163 KiB)": 163 * 1024, " (99 KiB)": 99 * 1024}


def parse(words: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--documents", type=int, action="append", help="in the row, of equal length; default: 4 and 1")
    parser.add_argument("--key-heads", type=int, default=16)
    parser.add_argument("--value-heads", type=int, default=32)
    return parser.parse_args(words)


def bound(kind: str, *ins: Tensor, **attrs: object) -> tuple[Callable[[], None], int, list[Tensor]]:
    """Return a launch of an op, the bytes of its inputs and outputs, and its outputs."""
    inputs = {Value(f"in{i}", tuple(x.shape), DTYPES[x.dtype], "act"): x for i, x in enumerate(ins)}
    specs = DEFINITIONS[kind].infer(tuple(inputs), attrs)
    outs = tuple(Value(spec.label, spec.shape, spec.dtype, "act") for spec in specs)
    binding = bind_kernel(kernels.KERNELS, Op(kind, tuple(inputs), outs, dict(attrs)), inputs)

    def launch() -> None:
        binding.launch(torch.cuda.current_stream().cuda_stream)

    launch()
    return launch, sum(value.nbytes for value in (*inputs, *outs)), [binding.buffers[out].tensor for out in outs]


def bf16(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda").bfloat16()


def layer(documents: int, key_heads: int, heads: int) -> Mapping[str, tuple[Callable[[], None], int]]:
    """Return a launch of each op, and its bytes. Decays are slow, as those of trained models."""
    sizes = {"n_k_heads": key_heads, "n_v_heads": heads, "k_dim": DIM, "v_dim": DIM}
    columns, width = (2 * key_heads + heads) * DIM, heads * DIM
    positions = (torch.arange(TOKENS, device="cuda") % (TOKENS // documents)).int()
    convolution = (bf16(TOKENS, columns), bf16(columns, 1, TAPS), positions)
    decays = torch.full((heads,), -4.0, device="cuda"), torch.zeros(heads, device="cuda")
    rule = (bf16(TOKENS, columns), bf16(TOKENS, 2 * heads), *decays, positions)
    norm = (bf16(TOKENS, width), bf16(TOKENS, width), bf16(DIM))
    launches: dict[str, tuple[Callable[[], None], int]] = {}

    def add(name: str, kind: str, *ins: Tensor, **attrs: object) -> list[Tensor]:
        *launches[name], outs = bound(kind, *ins, **attrs)  # type: ignore[assignment]
        return outs

    add("causal_conv", "causal_conv", *convolution)
    for kind in ("causal_conv_bwd", "causal_conv_dgrad"):
        add(kind, kind, bf16(TOKENS, columns), *convolution)
    _, states = add("gated_delta_rule", "gated_delta_rule", *rule, **sizes)
    for kind in ("gated_delta_out", "gated_delta_states"):
        add(kind, kind, *rule, **sizes)
    for name, nbytes in BLOCKS.items():
        kernels.SHARED_MEMORY = nbytes
        add(f"gated_delta_rule_bwd{name}", "gated_delta_rule_bwd", bf16(TOKENS, width), *rule, states, **sizes)
    kernels.SHARED_MEMORY = 0
    _, rstd = add("gated_rmsnorm", "gated_rmsnorm", *norm, eps=1e-6)
    for kind in ("gated_rmsnorm_bwd", "gated_rmsnorm_dgrad"):
        add(kind, kind, bf16(TOKENS, width), *norm, rstd)
    return launches


def inside(launch: Callable[[], None]) -> Mapping[str, float]:
    """Return the microseconds of each kernel of a launch, of the mean of five."""
    torch.cuda.synchronize()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(5):
            launch()
        torch.cuda.synchronize()
    sums: Counter[str] = Counter()
    for event in profile.events():
        if event.device_type.name != "CUDA":
            continue
        name = event.name.partition("(anonymous namespace)::")[2] or event.name
        sums[name.partition("(")[0]] += event.device_time / 5
    return sums


def main() -> None:
    arguments = parse(sys.argv[1:])
    print(torch.cuda.get_device_name(), f"torch {torch.__version__}", arguments.key_heads, arguments.value_heads)
    for documents in arguments.documents or (4, 1):
        print(f"\n{documents} documents of {TOKENS // documents} tokens")
        launches = layer(documents, arguments.key_heads, arguments.value_heads)
        times = {name: 1e3 * milliseconds(launch) for name, (launch, _) in launches.items()}
        for name, (_, nbytes) in launches.items():
            print(f"  {name:36}{times[name]:8.1f} us{nbytes / times[name] / 1e3:8.0f} GB/s")
        for name, kinds in LAYERS.items():
            print(f"  layer, {name:29}{sum(times[kind] for kind in kinds):8.1f} us")
        for name in ("gated_delta_rule", "gated_delta_rule_bwd"):
            for kernel, microseconds in inside(launches[name][0]).items():
                print(f"  {name}: {kernel:40}{microseconds:8.1f} us")


if __name__ == "__main__":
    main()
