"""Quantizers of single tensors and of SwiGLU, compared bit for bit with a slow twin."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch
from fp8_twin import NUMBERS, amax_of, cast, codes, numbers, quantized, run, scale_of, scaled, value
from gate_forms import FORMS, GPT_OSS
from torch import Tensor

from surogate_core.api import DTYPES, Op, Value
from surogate_core.reference import ops as reference
from surogate_core.testing.binding import run_kernel
from surogate_core.testing.cases import cases
from surogate_core.testing.kernels import assert_close, same_bits
from surogate_recipes_fp8.kernels.quantizers import KERNELS

pytestmark = pytest.mark.gpu

FORMATS = ("e4m3", "e5m2")
SCALINGS = ("delayed", "given", "current", "fallback")
SHAPES = cases([(16, 16), (80, 272), (208, 144), (1040, 2064)], more=[(64, 128), (48, 16), (16, 4112), (4096, 896)])
INITIALISED = torch.tensor([1 / 37.5, 37.5])
EMPTY = torch.zeros(2)

E4M3_VECTORS = [
    *((0.0, 0), (2.0**-10, 0), (0.0009775390625, 1), (2.0**-9, 1), (0.0029296875, 2), (0.0048828125, 2)),
    *((0.0146484375, 8), (2.0**-6, 8), (1.0, 56), (1.0625, 56), (1.1875, 58), (17.0, 88), (18.0, 89), (19.0, 90)),
    *((240.0, 119), (248.0, 120), (447.0, 126), (448.0, 126), (449.0, 126), (464.0, 126), (465.0, 126), (480.0, 126)),
    *((1e9, 126), (-1.0625, 184)),
]
E5M2_VECTORS = [
    *((2.0**-17, 0), (7.7056884765625e-06, 1), (2.0**-16, 1), (1.0, 60), (1.125, 60), (1.375, 62), (57344.0, 123)),
    *((60000.0, 123), (61440.0, 123), (65536.0, 123), (1e30, 123), (-3.4, 195)),
]
"""Numbers and their codes, rounded to nearest even and saturated, by an independent implementation in NumPy."""


def states(scaling: str, scale: Tensor, amax: Tensor) -> tuple[dict[Value, Tensor], tuple[Value, ...]]:
    """Return the last inputs of an op with their contents, and those that it changes."""
    scale_in, amax_in = value("s", scale), value("amax", amax)
    ins = {
        "delayed": {scale_in: scale, amax_in: amax},
        "given": {scale_in: scale},
        "current": {amax_in: amax},
        "fallback": {scale_in: scale},
    }[scaling]
    return ins, (amax_in,) if amax_in in ins else ()


def check_quantized(
    out: dict[str, Tensor], x: Tensor, dtype: str, scaling: str, scale: Tensor, amax: Tensor, *, transposed: bool
) -> None:
    """Compare all that an op wrote about `x`, of which q was made."""
    used, raised = scaled(scaling, x, dtype, scale, amax)
    q = quantized(x, used, dtype)
    assert same_bits(codes(out["q"]), q)
    assert not transposed or same_bits(codes(out["q_t"]), q.T.contiguous())
    if "amax" in out:
        assert same_bits(out["amax"], raised)
    if scaling in ("current", "fallback"):
        assert same_bits(out["scale"], used)


def quantize(
    x: Tensor, dtype: str, scaling: str, scale: Tensor = INITIALISED, amax: Tensor = EMPTY, *, transposed: bool = True
) -> dict[str, Tensor]:
    rows, columns = x.shape
    source = value("x", x)
    ins, changed = states(scaling, scale, amax)
    outs = [value("q", (rows, columns), dtype)]
    outs += [value("q_t", (columns, rows), dtype)] if transposed else []
    outs += [value("scale", (2,), "fp32")] if scaling in ("current", "fallback") else []
    attrs = {"dtype": dtype, "scaling": scaling, "transposed": transposed}
    return run(KERNELS, Op("fp8_quantize", (source, *ins), tuple(outs), attrs), {source: x, **ins}, changed=changed)


@pytest.mark.parametrize("encode", [1.0, 0.37, 3.0e5, 0.0])
@pytest.mark.parametrize("dtype", FORMATS)
def test_every_bf16_is_cast_as_by_the_twin(dtype: str, encode: float) -> None:
    x = torch.arange(65536, dtype=torch.int32).to(torch.uint16).view(torch.bfloat16).view(256, 256)
    scale = torch.tensor([0.0, encode])
    out = quantize(x, dtype, "given", scale)
    check_quantized(out, x, dtype, "given", scale, EMPTY, transposed=True)


@pytest.mark.parametrize(("dtype", "vectors"), [("e4m3", E4M3_VECTORS), ("e5m2", E5M2_VECTORS)])
def test_casts_match_independent_vectors(dtype: str, vectors: list[tuple[float, int]]) -> None:
    x = torch.zeros(256)
    x[: len(vectors)] = torch.tensor([number for number, _ in vectors])
    out = quantize(x.view(16, 16), dtype, "given", torch.ones(2))
    expected = torch.tensor([code for _, code in vectors], dtype=torch.uint8)
    assert same_bits(codes(out["q"]).view(-1)[: len(vectors)], expected)
    assert same_bits(cast(x, dtype)[: len(vectors)], expected)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_quantize_matches_the_twin(shape: tuple[int, int], scaling: str, dtype: str, x_dtype: torch.dtype) -> None:
    x = numbers("normal", *shape, dtype=x_dtype)
    out = quantize(x, dtype, scaling)
    check_quantized(out, x, dtype, scaling, INITIALISED, EMPTY, transposed=True)


@pytest.mark.parametrize("size", [256, 2048, 2816, 128 * 4096])
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_a_part_of_a_matrix_matches_the_twin(size: int, x_dtype: torch.dtype) -> None:
    x = numbers("normal", 16, size // 16, dtype=x_dtype).flatten()
    source, scale = value("x", x), value("s", INITIALISED)
    attrs = {"dtype": "e4m3", "scaling": "given"}
    op = Op("fp8_quantize", (source, scale), (value("q", (size,), "e4m3"),), attrs)
    out = run(KERNELS, op, {source: x, scale: INITIALISED})
    assert same_bits(codes(out["q"]), quantized(x, INITIALISED, "e4m3"))


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize(("scaling", "initialised"), [(s, i) for s in SCALINGS for i in (True, False)])
@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_numbers_of_every_kind_match_the_twin(
    kind: str, scaling: str, initialised: bool, dtype: str, x_dtype: torch.dtype
) -> None:
    """The state already has an amax, and with uninitialised scales a flag, which must both stay if they are larger."""
    x = numbers(kind, 80, 272, dtype=x_dtype)
    scale, amax = (INITIALISED, torch.tensor([2.5, 0.0])) if initialised else (EMPTY, torch.tensor([0.0, 1.0]))
    out = quantize(x, dtype, scaling, scale, amax, transposed=initialised)
    check_quantized(out, x, dtype, scaling, scale, amax, transposed=initialised)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scaling", ["delayed", "current"])
@pytest.mark.parametrize("adds", [False, True])
@pytest.mark.parametrize("transposed", [False, True])
def test_column_sums_match_fp64(shape: tuple[int, int], scaling: str, adds: bool, transposed: bool) -> None:
    rows, columns = shape
    x = numbers("normal", *shape)
    before = torch.randn(columns) if adds else torch.zeros(columns)
    source, dbias = value("x", x), value("d_bias", (columns,), "fp32")
    ins, changed = states(scaling, INITIALISED, EMPTY)
    outs = [value("q", shape, "e5m2"), *([value("q_t", (columns, rows), "e5m2")] if transposed else []), dbias]
    outs += [value("scale", (2,), "fp32")] if scaling == "current" else []
    attrs = {"dtype": "e5m2", "scaling": scaling, "transposed": transposed, "column_sums": True}
    accumulate = frozenset({outs.index(dbias)} if adds else ())
    op = Op("fp8_quantize", (source, *ins), tuple(outs), attrs, accumulate=accumulate)
    out = run(KERNELS, op, {source: x, **ins, **({dbias: before} if adds else {})}, changed=changed)
    check_quantized(out, x, "e5m2", scaling, INITIALISED, EMPTY, transposed=transposed)
    terms = x.double()
    size = before.abs() + terms.abs().sum(0)
    assert_close(out["d_bias"], before + terms.sum(0), torch.float32, rows, magnitude=size)


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("x_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_amax_matches_the_twin(kind: str, shape: tuple[int, int], x_dtype: torch.dtype) -> None:
    x = numbers(kind, *shape, dtype=x_dtype)
    source, amax = value("x", x), value("amax", (2,), "fp32")
    (out,) = run_kernel(KERNELS, Op("fp8_amax", (source,), (amax,)), {source: x})
    assert same_bits(out, amax_of(x))


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("dtype", FORMATS)
def test_transpose_moves_every_byte(shape: tuple[int, int], dtype: str) -> None:
    source, target = value("q", shape, dtype), value("q_t", shape[::-1], dtype)
    q = torch.randint(0, 256, shape, dtype=torch.uint8)
    typed = q.view(torch.float8_e4m3fn if dtype == "e4m3" else torch.float8_e5m2)
    (out,) = run_kernel(KERNELS, Op("fp8_transpose", (source,), (target,)), {source: typed})
    assert same_bits(codes(out), q.T.contiguous())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("wide", [False, True])
def test_swiglu_quantizes_what_it_writes_in_bf16(shape: tuple[int, int], scaling: str, wide: bool) -> None:
    rows, width = shape
    gate_up = numbers("normal", rows, 2 * width) * 3
    source = value("gate_up", gate_up)

    def of(scaling: str, wide: bool) -> dict[str, Tensor]:
        ins, changed = states(scaling, INITIALISED, EMPTY)
        outs = [value("q", shape, "e4m3"), value("q_t", (width, rows), "e4m3")]
        outs += [value("swiglu", shape)] if wide else []
        outs += [value("scale", (2,), "fp32")] if scaling in ("current", "fallback") else []
        attrs = {"dtype": "e4m3", "scaling": scaling, "transposed": True, "wide": wide}
        op = Op("fp8_swiglu", (source, *ins), tuple(outs), attrs)
        return run(KERNELS, op, {source: gate_up, **ins}, changed=changed)

    out, written = of(scaling, wide), of("given", True)["swiglu"]
    assert not wide or same_bits(out["swiglu"], written)
    check_quantized(out, written, "e4m3", scaling, INITIALISED, EMPTY, transposed=True)
    truth = reference.swiglu(gate_up.double())
    assert_close(written, truth, torch.bfloat16, 1, magnitude=truth.abs())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize(("hidden", "wide", "transposed"), list(product([None, "e4m3"], [False, True], [False, True])))
def test_swiglu_bwd_quantizes_what_it_writes_in_bf16(
    shape: tuple[int, int], scaling: str, hidden: str | None, wide: bool, transposed: bool
) -> None:
    rows, width = shape
    dout, gate_up = numbers("normal", *shape), numbers("normal", rows, 2 * width) * 3
    sources = {value("dy", dout): dout, value("gate_up", gate_up): gate_up}
    hidden_scale = torch.tensor([1 / 20.0, 20.0])

    def of(scaling: str, hidden: str | None, wide: bool, transposed: bool) -> dict[str, Tensor]:
        given = {value("hidden_scale", hidden_scale): hidden_scale} if hidden else {}
        ins, changed = states(scaling, INITIALISED, EMPTY)
        outs = [value("q", (rows, 2 * width), "e5m2")]
        outs += [value("q_t", (2 * width, rows), "e5m2")] if transposed else []
        outs += [value("d_gate_up", (rows, 2 * width))] if wide else []
        outs += [value("h_t", (width, rows), hidden)] if hidden else []
        outs += [value("scale", (2,), "fp32")] if scaling in ("current", "fallback") else []
        attrs = {"dtype": "e5m2", "scaling": scaling, "transposed": transposed, "wide": wide, "hidden": hidden}
        op = Op("fp8_swiglu_bwd", (*sources, *given, *ins), tuple(outs), attrs)
        return run(KERNELS, op, {**sources, **given, **ins}, changed=changed)

    out, written = of(scaling, hidden, wide, transposed), of("given", None, True, False)["d_gate_up"]
    assert not wide or same_bits(out["d_gate_up"], written)
    check_quantized(out, written, "e5m2", scaling, INITIALISED, EMPTY, transposed=transposed)
    d, (gate, up) = dout.double(), gate_up.double().chunk(2, dim=1)
    sigmoid, complement = torch.sigmoid(gate), torch.sigmoid(-gate)
    # 1 + gate (1 - sigmoid) cancels near gate = -1.28, so the error is relative to its terms.
    dgate, dup = d * up * sigmoid * (1 + gate * complement), d * gate * sigmoid
    size = torch.cat(((d * up * sigmoid).abs() * (1 + (gate * complement).abs()), dup.abs()), dim=1)
    assert_close(written, torch.cat((dgate, dup), dim=1), torch.bfloat16, 1, magnitude=size)
    if hidden:
        h = of_swiglu(gate_up)
        assert same_bits(codes(out["h_t"]), quantized(h, hidden_scale, hidden).T.contiguous())


def of_swiglu(gate_up: Tensor) -> Tensor:
    """Return what `fp8_swiglu` quantizes."""
    rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    source, scale = value("gate_up", gate_up), value("s", INITIALISED)
    outs = (value("q", (rows, width), "e4m3"), value("swiglu", (rows, width)))
    attrs = {"dtype": "e4m3", "scaling": "given", "wide": True}
    op = Op("fp8_swiglu", (source, scale), outs, attrs)
    return run(KERNELS, op, {source: gate_up, scale: INITIALISED})["swiglu"]


@pytest.mark.parametrize("width", [272, 3072])
def test_swiglu_has_the_bits_of_the_bf16_kernels(width: int) -> None:
    bf16 = pytest.importorskip("surogate_recipes_bf16._C")
    from surogate_recipes_fp8 import _C

    rows, stream = 80, torch.cuda.current_stream().cuda_stream
    gate_up, dout = (numbers("normal", rows, columns).cuda() * 3 for columns in (2 * width, width))
    out, out_8 = (torch.empty_like(dout) for _ in range(2))
    dgate_up, dgate_up_8 = (torch.empty_like(gate_up) for _ in range(2))
    q = torch.empty(rows * 2 * width, dtype=torch.uint8, device="cuda")
    code, scale = DTYPES["bf16"].code, INITIALISED.cuda()
    given = (DTYPES["e4m3"].code, 1, scale.data_ptr(), 0, 0, 0, stream)
    a, b, c = gate_up.data_ptr(), dout.data_ptr(), q.data_ptr()
    bf16.swiglu(a, out.data_ptr(), rows, width, code, stream)
    _C.fp8_swiglu(a, c, 0, out_8.data_ptr(), rows, width, *given)
    bf16.swiglu_bwd(b, a, dgate_up.data_ptr(), 0, rows, width, code, stream)
    _C.fp8_swiglu_bwd(b, a, c, 0, dgate_up_8.data_ptr(), 0, 0, 0, rows, width, DTYPES["e5m2"].code, *given[1:])
    torch.cuda.synchronize()
    assert same_bits(out, out_8) and same_bits(dgate_up, dgate_up_8)


def test_current_scaling_of_tiny_numbers_has_a_finite_scale() -> None:
    """448 / amax overflows for an amax below 1.3e-36."""
    x = torch.full((16, 16), 1e-38, dtype=torch.bfloat16)
    out = quantize(x, "e4m3", "current")
    assert same_bits(out["scale"], scale_of(amax_of(x)[0], "e4m3"))
    assert bool(out["scale"].isfinite().all())


def test_errors_name_the_invalid_argument() -> None:
    from surogate_recipes_fp8 import _C

    def launch(x: int, columns: int, dtype_x: int, dtype: int, scaling: int) -> None:
        _C.fp8_quantize(x, 256, 0, 0, 0, 0, 16, columns, False, 0, dtype_x, dtype, scaling, 0, 0, 0, 0, 0)

    for arguments, message in (
        ((0, 16, 1, 5, 2), "fp8_quantize: x is a null pointer"),
        ((8, 16, 1, 5, 2), "fp8_quantize: x must be aligned to 16 bytes"),
        ((256, 24, 1, 5, 2), "fp8_quantize: columns must be a multiple of 16, got 24"),
        ((256, 16, 1, 5, 1), "fp8_quantize: scale is a null pointer"),
        ((256, 16, 1, 5, 2), "fp8_quantize: the scale that is written is a null pointer"),
    ):
        with pytest.raises(ValueError, match=message):
            launch(*arguments)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_geglu_quantizes_what_the_kernels_of_gemma_write(shape: tuple[int, int], scaling: str) -> None:
    """And so does its gradient, which makes the output again."""
    gemma = pytest.importorskip("surogate_models_gemma.kernels").KERNELS
    rows, width = shape
    gate_up, dout = numbers("normal", rows, 2 * width) * 3, numbers("normal", *shape)
    wide, half, gradient = value("gate_up", gate_up), value("geglu", shape), value("d_gate_up", (rows, 2 * width))
    top = value("dy", dout)
    (written,) = run_kernel(gemma, Op("geglu", (wide,), (half,)), {wide: gate_up})
    (d_written,) = run_kernel(gemma, Op("geglu_bwd", (top, wide), (gradient,)), {top: dout, wide: gate_up})
    ins, changed = states(scaling, INITIALISED, EMPTY)
    scale = [value("scale", (2,), "fp32")] if scaling in ("current", "fallback") else []
    attrs = {"scaling": scaling, "transposed": True, "wide": True}
    outs = (value("q", shape, "e4m3"), value("q_t", (width, rows), "e4m3"), half, *scale)
    op = Op("fp8_geglu", (wide, *ins), outs, {**attrs, "dtype": "e4m3"})
    out = run(KERNELS, op, {wide: gate_up, **ins}, changed=changed)
    assert same_bits(out["geglu"], written)
    check_quantized(out, written, "e4m3", scaling, INITIALISED, EMPTY, transposed=True)

    hidden_scale = torch.tensor([1 / 20.0, 20.0])
    hidden = value("hidden_scale", hidden_scale)
    outs = (value("q", (rows, 2 * width), "e5m2"), value("q_t", (2 * width, rows), "e5m2"), gradient)
    outs = (*outs, value("h_t", (width, rows), "e4m3"), *scale)
    op = Op("fp8_geglu_bwd", (top, wide, hidden, *ins), outs, {**attrs, "dtype": "e5m2", "hidden": "e4m3"})
    out = run(KERNELS, op, {top: dout, wide: gate_up, hidden: hidden_scale, **ins}, changed=changed)
    assert same_bits(out["d_gate_up"], d_written)
    check_quantized(out, d_written, "e5m2", scaling, INITIALISED, EMPTY, transposed=True)
    assert same_bits(codes(out["h_t"]), quantized(written, hidden_scale, "e4m3").T.contiguous())


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("form", [{}, GPT_OSS], ids=["swiglu", "gpt-oss"])
def test_gates_of_experts_quantize_what_the_kernels_of_mixtures_write(
    shape: tuple[int, int], scaling: str, wide: bool, form: dict[str, Any]
) -> None:
    check_gate(shape, scaling, wide, form)


@pytest.mark.parametrize("scaling", ["delayed", "current"])
@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("form", FORMS[1:], ids=str)
def test_so_do_gates_of_every_form(scaling: str, wide: bool, form: dict[str, Any]) -> None:
    check_gate((80, 272), scaling, wide, form)


def check_gate(shape: tuple[int, int], scaling: str, wide: bool, form: dict[str, Any]) -> None:
    """Compare the gate, its gradient and the gradients of the weights with those in bf16, bit for bit."""
    moe = pytest.importorskip("surogate_models_moe.kernels").KERNELS
    rows, width = shape
    gate_up, dout = numbers("normal", rows, 2 * width) * 3, numbers("normal", *shape)
    weights, order = torch.rand(rows // 2, 2), torch.randperm(rows).int()
    routed = {value("gate_up", gate_up): gate_up, value("weights", weights): weights, value("order", order): order}
    top, half, gradient = value("dy", dout), value("swiglu", shape), value("d_gate_up", (rows, 2 * width))
    d_weights = value("d_weights", weights)
    (written,) = run_kernel(moe, Op("weighted_swiglu", (*routed,), (half,), form), routed)
    op = Op("weighted_swiglu_bwd", (top, *routed), (gradient, d_weights), form)
    d_written, d_weights_written = run_kernel(moe, op, {top: dout, **routed})

    ins, changed = states(scaling, INITIALISED, EMPTY)
    scale = [value("scale", (2,), "fp32")] if scaling in ("current", "fallback") else []
    attrs = {"scaling": scaling, "wide": wide, **form}
    outs = (value("q", shape, "e4m3"), *([half] if wide else []), *scale)
    op = Op("fp8_weighted_swiglu", (*routed, *ins), outs, {**attrs, "dtype": "e4m3"})
    out = run(KERNELS, op, {**routed, **ins}, changed=changed)
    assert not wide or same_bits(out["swiglu"], written)
    check_quantized(out, written, "e4m3", scaling, INITIALISED, EMPTY, transposed=False)

    outs = (value("q", (rows, 2 * width), "e5m2"), *([gradient] if wide else []), d_weights, *scale)
    op = Op("fp8_weighted_swiglu_bwd", (top, *routed, *ins), outs, {**attrs, "dtype": "e5m2"})
    out = run(KERNELS, op, {top: dout, **routed, **ins}, changed=changed)
    assert not wide or same_bits(out["d_gate_up"], d_written)
    assert same_bits(out["d_weights"], d_weights_written)
    check_quantized(out, d_written, "e5m2", scaling, INITIALISED, EMPTY, transposed=False)


@pytest.mark.parametrize("kind", NUMBERS)
@pytest.mark.parametrize("scaling", ["delayed", "current"])
@pytest.mark.parametrize("form", [{}, GPT_OSS], ids=["swiglu", "gpt-oss"])
def test_the_gradient_of_experts_may_overwrite_what_it_is_made_of(
    kind: str, scaling: str, form: dict[str, Any]
) -> None:
    """In one buffer, and of numbers of every kind."""
    rows, width = 80, 272
    gate_up, dout = numbers(kind, rows, 2 * width), numbers("normal", rows, width)
    weights, order = torch.rand(rows // 2, 2), torch.randperm(rows).int()
    top, source, routes = value("dy", dout), value("gate_up", gate_up), value("weights", weights)
    slots, d_weights, gradient = value("order", order), value("d_weights", weights), value("d_gate_up", gate_up)
    given, changed = states(scaling, INITIALISED, EMPTY)
    scale = [value("scale", (2,), "fp32")] if scaling == "current" else []
    contents = {top: dout, source: gate_up, routes: weights, slots: order, **given}

    def of(written: Value, changed: tuple[Value, ...]) -> dict[str, Tensor]:
        outs = (value("q", gate_up.shape, "e5m2"), written, d_weights, *scale)
        attrs = {"dtype": "e5m2", "scaling": scaling, "wide": True, **form}
        op = Op("fp8_weighted_swiglu_bwd", (top, source, routes, slots, *given), outs, attrs)
        return run(KERNELS, op, contents, changed=changed)

    apart, within = of(gradient, changed), of(source, changed)
    assert same_bits(within.pop("gate_up"), apart.pop("d_gate_up"))
    assert all(same_bits(within[name].view(torch.uint8), found.view(torch.uint8)) for name, found in apart.items())
