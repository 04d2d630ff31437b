"""FP8 quantization, slowly: from the values of all codes, without the conversions of torch or of CUDA."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from surogate_core.api import KernelDef, Op, Value
from surogate_core.reference.rounding import TORCH_DTYPES
from surogate_core.testing.binding import bind_kernel
from surogate_core.testing.kernels import eager_and_graph

LARGEST = {"e4m3": 448.0, "e5m2": 57344.0}
FLT_MAX = torch.finfo(torch.float32).max


def finite_values(dtype: str) -> Tensor:
    """Return the finite non-negative values of a dtype in the order of their codes, which is ascending."""
    mantissa_bits, bias, count = {"e4m3": (3, 7, 0x7F), "e5m2": (2, 15, 0x7C)}[dtype]
    one = 1 << mantissa_bits
    values = []
    for code in range(count):
        exponent, mantissa = code >> mantissa_bits, code & (one - 1)
        significand = mantissa if exponent == 0 else one + mantissa
        values.append(significand * 2.0 ** (max(exponent, 1) - bias - mantissa_bits))
    return torch.tensor(values, dtype=torch.float64)


def cast(x: Tensor, dtype: str) -> Tensor:
    """Return the codes (uint8) of fp32 numbers: nearest, ties to the even code, saturated; 0x7F for NaN."""
    values = finite_values(dtype)
    between = (values[:-1] + values[1:]) / 2
    magnitude = x.double().abs().nan_to_num(nan=0.0, posinf=torch.inf)
    code = torch.searchsorted(between, magnitude)
    tie = (code < len(between)) & (between[code.clamp(max=len(between) - 1)] == magnitude)
    code += tie & (code % 2 == 1)
    code += torch.where(torch.signbit(x), 0x80, 0)
    return torch.where(x.isnan(), 0x7F, code).to(torch.uint8)


def amax_of(x: Tensor) -> Tensor:
    """Return (largest finite |x|, 1 if an element is not finite) in fp32."""
    finite = x.isfinite()
    top = x.float().abs().where(finite, 0.0).max()
    return torch.stack([top, torch.tensor(0.0 if bool(finite.all()) else 1.0)])


def scale_of(amax: Tensor, dtype: str) -> Tensor:
    """Return (decode, encode) in fp32."""
    top = amax.float()
    encode = torch.where(top == 0, 1.0, (torch.tensor(LARGEST[dtype]) / top).clamp(max=FLT_MAX))
    return torch.stack([1.0 / encode, encode])


def quantized(x: Tensor, scale: Tensor, dtype: str) -> Tensor:
    """Return the codes of a tensor in a scale (decode, encode). An encode factor of 0 counts as 1."""
    encode = float(scale[1]) or 1.0
    return cast(x.float() * torch.tensor(encode), dtype)


def scaled(scaling: str, x: Tensor, dtype: str, scale: Tensor, amax: Tensor) -> tuple[Tensor, Tensor]:
    """Return (scale, amax afterwards) of a quantizer of `x` with this state."""
    mine = amax_of(x)
    current = scaling == "current" or (scaling == "fallback" and float(scale[1]) == 0)
    used = scale_of(mine[0], dtype) if current else scale
    if current and mine[1] != 0:
        used[0] = torch.nan
    return used, torch.maximum(mine, amax) if scaling in ("delayed", "current") else amax


def codes(tensor: Tensor) -> Tensor:
    """Return the bytes of an FP8 tensor."""
    return tensor.view(torch.uint8)


def value(name: str, tensor: Tensor | tuple[int, ...], dtype: str = "bf16") -> Value:
    """Return an activation with this shape, and the dtype of the tensor."""
    if isinstance(tensor, Tensor):
        dtype = next(key for key, torch_dtype in TORCH_DTYPES.items() if torch_dtype == tensor.dtype)
        return Value(name=name, shape=tuple(tensor.shape), dtype=dtype, role="act")
    return Value(name=name, shape=tensor, dtype=dtype, role="act")


def run(
    kernels: tuple[KernelDef, ...], op: Op, contents: dict[Value, Tensor], *, changed: tuple[Value, ...] = ()
) -> dict[str, Tensor]:
    """Run an op eagerly and captured, and return its outputs and `changed` inputs by name, on the CPU."""
    binding = bind_kernel(kernels, op, contents)
    buffers = {**binding.buffers}
    for state in changed:
        buffers[state] = replace(buffers[state], constant=None)
    eager_and_graph(binding.launch, list(buffers.values()), scratch=binding.workspaces)
    return {v.name: buffers[v].tensor.cpu() for v in (*op.outs, *changed)}


NUMBERS = ("normal", "heavy tails", "zeros", "subnormal", "huge", "not finite")


def numbers(kind: str, *shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Return random numbers of a kind. All but "zeros" contain both zeros."""
    x = torch.randn(shape)
    if kind == "heavy tails":
        x = x / torch.rand(shape).clamp(min=1e-6) ** 2
    elif kind == "zeros":
        return torch.zeros(shape, dtype=dtype)
    elif kind == "subnormal":
        x = x * 2.0**-128
    elif kind == "huge":
        x = x.to(dtype).float() * 2.0**125
    x = x.clamp(-3e38, 3e38).to(dtype)
    flat = x.view(-1)
    special = [0.0, -0.0] + ([torch.inf, -torch.inf, torch.nan] if kind == "not finite" else [])
    at = torch.randperm(flat.numel())[: len(special)]
    flat[at] = torch.tensor(special, dtype=dtype)[: len(at)]
    return x
