"""Times the update of each optimizer alone, without the norm of the gradients: ms, and share of this GPU's copy rate.

    python benchmarks/optimizers.py
    python benchmarks/optimizers.py --layers 36 --only adamw_8bit

The params are those of qwen3-8b with `--layers` blocks, and the op is that of a plan, launched in a CUDA graph with
random gradients. Bytes are those of its inputs and outputs; what a kernel moves besides is not counted. The copy rate
is that of a kernel of torch, read plus written. For NorMuon, whose time is mostly that of products, FLOP/s are shown
beside those of a plain product, timed in turn.
"""

from __future__ import annotations

import argparse
import importlib
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import step as steps
import torch
from dequantize import copy_rate, microseconds, moved
from torch import Tensor

from surogate_core.api import KernelDef, Op, Value
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.binding import Binding, bind_kernel

HERE = Path(__file__).parent
MODEL = "qwen3-8b"
OPTIMIZERS: Mapping[str, tuple[str, ...]] = {
    "adamw": ("optimizer_state_dtype=bf16",),
    "adamw_8bit": (),
    "normuon": ("optimizer_state_dtype=bf16",),
}
DTYPES = ("param_grad_dtype", "master_dtype", "model_dtype")
COMBINATIONS = (
    ("bf16", "bf16", "bf16"),
    ("fp32", "bf16", "bf16"),
    ("bf16", "fp32", "bf16"),
    ("fp32", "fp32", "bf16"),
    ("fp32", "fp32", "fp32"),
)
"""Of gradients, masters and the weights that the model computes with: a copy, unless masters have the same dtype."""
PRODUCT = (8192, 4096, 4096)


def update_op(optimizer: str, dtypes: tuple[str, ...], layers: int) -> Op:
    """Return the op with which `optimizer` updates all params of a model with `layers` blocks."""
    keys = [f"{key}={dtype}" for key, dtype in zip(DTYPES, dtypes, strict=True)]
    with tempfile.TemporaryDirectory() as folder:
        config = json.loads((HERE / "models" / MODEL / "config.json").read_text()) | {"num_hidden_layers": layers}
        (Path(folder) / "config.json").write_text(json.dumps(config))
        settings = [w for key in (f"optimizer={optimizer}", *OPTIMIZERS[optimizer], *keys) for w in ("--set", key)]
        words = ["--model", folder, "--batch", "1", "--seq-len", "256", *settings]
        _, plan = steps.plan(steps.parse(words), 1)
    (op,) = (op for op in plan.assembly.only("update").ops if op.kind == optimizer)
    return op


def contents(op: Op, device: str) -> Iterator[tuple[Value, Tensor]]:
    """Yield what the inputs hold at the first step: scalars, random gradients and masters, moments of zero."""
    n = op.attrs["n"]
    numbers = (1.0, 1e-4, 1, 1234)
    yield from ((v, torch.tensor(x, dtype=TORCH_DTYPES[v.dtype])) for v, x in zip(op.ins[:4], numbers, strict=True))
    for index, value in enumerate(op.ins[4:]):
        if index < 2 * n:
            scale = 1e-3 if index < n else 0.02
            yield value, (scale * torch.randn(value.shape, device=device)).to(TORCH_DTYPES[value.dtype])
        else:
            yield value, torch.zeros(value.shape, dtype=TORCH_DTYPES[value.dtype], device=device)


def kernels(optimizer: str) -> tuple[KernelDef, ...]:
    found: tuple[KernelDef, ...] = importlib.import_module(f"surogate_optim_{optimizer}.kernels").KERNELS
    return found


def bound(optimizer: str, op: Op) -> Binding:
    """Return the op with buffers of its own, after two updates: the first moments of zero take a slower way."""
    binding = bind_kernel(kernels(optimizer), op, dict(contents(op, "cuda")))
    for _ in range(2):
        binding.launch(torch.cuda.current_stream().cuda_stream)
    return binding


def product_rate() -> float:
    """Return FLOP/s of a plain product of random bf16 matrices."""
    m, n, k = PRODUCT
    a, b = (torch.randn(rows, k, device="cuda", dtype=torch.bfloat16) for rows in (m, n))
    out = torch.empty(m, n, device="cuda", dtype=torch.bfloat16)

    def launch(stream: int) -> None:
        for _ in range(20):
            torch.mm(a, b.t(), out=out)

    return 20 * 2 * m * n * k / microseconds(launch) * 1e6


def flops(op: Op) -> int:
    """Return the FLOPs of NorMuon's products, as plans count them."""
    from surogate_optim_normuon.optimizer import NORMUON_OP

    return NORMUON_OP.flops(op)


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--only", choices=list(OPTIMIZERS), action="append")
    arguments = parser.parse_args()
    rate = copy_rate()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}, {time.strftime('%Y-%m-%d')}")
    print(f"{MODEL} with {arguments.layers} blocks; a copy: {rate / 1e12:.2f} TB/s")
    print(f"{'optimizer':12}{'gradients, masters, weights':30}{'ms':>9}{'TB/s':>8}{'of copy':>9}")
    for optimizer in arguments.only or OPTIMIZERS:
        for dtypes in COMBINATIONS:
            op = update_op(optimizer, dtypes, arguments.layers)
            binding = bound(optimizer, op)
            took = microseconds(binding.launch)
            achieved = moved(op) / took * 1e6
            line = f"{optimizer:12}{', '.join(dtypes):30}{took / 1e3:9.2f}{achieved / 1e12:8.2f}{achieved / rate:9.1%}"
            if optimizer == "normuon":
                line += f"  {flops(op) / took / 1e6:.0f} TFLOP/s, a plain product {product_rate() / 1e12:.0f}"
            print(line, flush=True)
            del binding
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
