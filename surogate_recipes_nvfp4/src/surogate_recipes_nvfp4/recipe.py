"""The `nvfp4` recipe: products of the blocks of E2M1 operands, with a scale for every 16 elements.

The scale of a block is E4M3, relative to the largest magnitude of the whole tensor. Activations and weights are rounded
to nearest, gradients stochastically. The first blocks of the model and the last ones stay in bf16, as training needs
some products in more bits (NVIDIA, "Pretraining Large Language Models with NVFP4", 2025).

The recipe has no state of its own besides the quantized weights. Those of trained weights are written after every
update, those of frozen ones once.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from typing import Annotated, Literal

from pydantic import Field

from surogate_core.api import (
    DeviceInfo,
    LowerContext,
    LoweringDef,
    Precision,
    PrecisionRequest,
    Program,
    Programs,
    RecipeDef,
    Support,
    Value,
)
from surogate_core.api.products import SkippedBlocks, lower_products, quantized_precision, quantized_weights

from .formats import ATOM_ROWS, STORED_LAYOUT
from .lowering import Fp4Quantizer, Settings, StoredWeight, Weights
from .numerics import Measured

MULTIPLE = 32
"""Every dimension of a product with FP4 operands is a multiple of this: cuBLASLt reads rows of 16 bytes."""

PRODUCT_ERROR = 0.14
"""Relative rms error of a product of Gaussian operands, each rounded to about 10 %: measured (tests)."""

BF16 = "use recipe: bf16"

FEW_BLOCKS = 8
"""A model of fewer blocks leaves fewer of them in bf16 by default."""


class Nvfp4Options(SkippedBlocks):
    """Options of the recipe."""

    fp4_backend: Literal["auto", "emulate", "cublaslt", "cutlass", "cudnn"] = Field(
        "auto",
        description="Library of the products. emulate: bf16 products of the same operands, on any GPU. auto: cublaslt "
        "from SM100 (Blackwell), otherwise emulate.",
    )
    fp4_four_over_six: bool | Literal["all"] = Field(
        True,
        description="Scale blocks of activations to the largest value 4 instead of 6 where that rounds better. all: "
        "blocks of gradients and weights too.",
    )
    fp4_weight_blocks: Literal["auto", "16x16", "1x16"] = Field(
        "auto",
        description="Elements of a weight that share a scale. 16x16: both passes read the same numbers. auto: 16x16; a "
        "frozen weight that is stored in FP4 is not quantized again, and its input gradients are products in bf16.",
    )
    no_fp4_hadamard: bool = Field(False, description="Do not transform the operands of weight gradients.")
    no_fp4_stochastic_rounding: bool = Field(False, description="Round gradients to nearest.")
    skip_quant_first_layers: Annotated[int | None, Field(ge=0)] = Field(  # type: ignore[assignment]
        None,
        description="First blocks of the model whose products stay in bf16. Default: 1; none of fewer than 8 blocks.",
    )
    skip_quant_last_layers: Annotated[int | None, Field(ge=0)] = Field(  # type: ignore[assignment]
        None,
        description="Last blocks of the model whose products stay in bf16. Default: a tenth of them, at least 2; 1 of "
        "fewer than 8 blocks, none of one.",
    )

    def skipped(self, blocks: int) -> tuple[int, int]:
        few = blocks < FEW_BLOCKS
        first, last = self.skip_quant_first_layers, self.skip_quant_last_layers
        if first is None:
            first = 0 if few else 1
        if last is None:
            last = min(1, blocks - 1) if few else max(2, round(blocks / 10))
        return first, last


def precision(request: PrecisionRequest, options: Nvfp4Options) -> Precision:
    """Return E2M1 operands."""
    return quantized_precision(request, "nvfp4", "e2m1", "e2m1")


def supports(device: DeviceInfo, precision: Precision, options: Nvfp4Options | None = None) -> Support:
    """A GPU must have bf16 tensor cores, and FP4 ones for a library of FP4 products. A CPU runs the references."""
    chosen = options.fp4_backend if options is not None else "auto"
    if chosen in ("cutlass", "cudnn"):
        return Support(
            False,
            f"fp4_backend: {chosen}: this package has no products by {chosen}. Use fp4_backend: auto, which takes "
            "cublaslt where the GPU multiplies FP4",
        )
    if device.sm is None:
        return Support(True)
    if device.sm < 80:
        return Support(False, f"NVFP4 needs SM80 (Ampere) or newer, {device.title} is SM{device.sm}")
    if chosen == "cublaslt" and device.sm < 100:
        return Support(
            False,
            f"fp4_backend: cublaslt: FP4 products need SM100 (Blackwell) or newer, {device.title} is SM{device.sm}. "
            "Use fp4_backend: emulate, or auto",
        )
    return Support(True)


def backend(options: Nvfp4Options, context: LowerContext) -> str:
    """Return what multiplies: "emulate" or "cublaslt"."""
    sm = context.target.device.sm if context.target else None
    if options.fp4_backend == "auto":
        return "cublaslt" if (sm or 0) >= 100 else "emulate"
    return options.fp4_backend


def lower(programs: Programs, context: LowerContext[Nvfp4Options]) -> Programs:
    """Lower the products of the blocks, and keep the quantized weights up to date."""
    return _lowered(programs, context, context.options)


def lower_with_defaults(programs: Programs, context: LowerContext) -> Programs:
    """Lower the products of the blocks with the recipe's default options: for other recipes."""
    return _lowered(programs, context, Nvfp4Options.model_validate({}))


def _lowered(programs: Programs, context: LowerContext, options: Nvfp4Options) -> Programs:
    settings = _settings(programs, context, options)
    weights = Weights(context.builder, settings)

    def lowered(program: Program, measured: Measured | None = None) -> Program:
        quantizer = Fp4Quantizer(context.builder, context.scalars, settings, weights, measured)
        return lower_products(program, context.builder, settings.weights, lambda operands: quantizer)

    numerics = None
    if context.numerics:
        measured = Measured(context.builder)
        numerics = measured.report(lowered(programs.micro, measured))
    programs = replace(programs, micro=lowered(programs.micro), evaluate=lowered(programs.evaluate), numerics=numerics)
    return _with_quantized_weights(programs, context, settings, weights)


def _settings(programs: Programs, context: LowerContext, options: Nvfp4Options) -> Settings:
    weights = quantized_weights(programs, context, options, MULTIPLE, "NVFP4 products", BF16)
    stored = _stored(context, weights.params) if options.fp4_weight_blocks == "auto" else {}
    return Settings(
        weights=replace(weights, forward_only=frozenset(stored)),
        stored=stored,
        backend=backend(options, context),
        four_over_six={"all": ("x", "dy", "w"), True: ("x",), False: ()}[options.fp4_four_over_six],
        hadamard=not options.no_fp4_hadamard,
        stochastic=not options.no_fp4_stochastic_rounding,
        square=options.fp4_weight_blocks != "1x16",
    )


def _stored(context: LowerContext, weights: Collection[Value]) -> dict[Value, StoredWeight]:
    """Return the weights that products can read as they are stored.

    There is a product for each matrix of a fused weight. Those after the first begin where atoms of scales do.
    """
    found = {}
    for weight in weights if context.layout == STORED_LAYOUT else ():
        rows = tuple(matrix.rows for matrix in context.params[weight].matrices)
        if not any(n % ATOM_ROWS for n in rows[:-1]) and not rows[-1] % MULTIPLE:
            found[weight] = StoredWeight(tuple(context.stored[weight][:3]), rows)
    return found


def _with_quantized_weights(
    programs: Programs, context: LowerContext, settings: Settings, weights: Weights
) -> Programs:
    """Quantize all weights in `derive`, and the trained ones again after every update."""
    b, derive = context.builder, []
    for weight in weights.all:
        with b.record("derive", weight.weight.block) as emitted:
            weight.quantize(b, settings)
        derive += emitted
    with b.record("update") as update:
        for weight in weights.all:
            if settings.weights.is_trained(weight.weight):
                weight.quantize(b, settings)
    return programs.appending(derive, update)


def product_error(precision: Precision, options: object = None) -> float:
    return PRODUCT_ERROR


NVFP4 = RecipeDef(
    name="nvfp4",
    summary="FP4 products (E2M1 with a scale for 16 elements), stochastically rounded gradients; everything else bf16",
    options=Nvfp4Options,
    precision=precision,
    supports=supports,
    lower=lower,
    product_error=product_error,
    kernels_of=("bf16",),
)

E2M1 = LoweringDef(
    matmul="e2m1",
    gradient="e2m1",
    summary="NVFP4 products with the default options of the recipe nvfp4",
    supports=supports,
    lower=lower_with_defaults,
    product_error=product_error,
)
