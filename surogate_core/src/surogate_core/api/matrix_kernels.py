"""Kernels of the ops that read a matrix which a `MatrixStorage` has stored."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

from ..dtypes import DTYPES
from ..program.op import Op
from ..program.value import Value
from .base import Support, Target
from .kernels import BindContext, Call, KernelDef
from .matrix_storage import MatrixStorage, supports


def reading_kernels(
    storage: MatrixStorage,
    module: str,
    shape: Callable[[Op], Sequence[Any]],
    *,
    stored: Callable[[Sequence[Value], BindContext], Sequence[Value | int]] = lambda values, ctx: values,
    supports: Callable[[Op, Target], Support] = supports,
) -> tuple[KernelDef, ...]:
    """Return the kernels of `<kind>_dequantize`, `<kind>_amax` and the copies, such as `<kind>_to_e4m3`.

    They call the functions of these names in `module` with `stored` of the stored values, the amax that copies read and
    of a storage `apart` the number of its matrices, the outputs, whether the copy is transposed, `shape` of the op, the
    code of the dtype of the dequantized weight, and the stream.
    """

    def bind(op: Op, ctx: BindContext) -> Call:
        copied = (op.attrs["transposed"],) if "transposed" in op.attrs else ()
        count = len(op.ins) - len(copied)
        amax = [v for one in op.ins[count:] for v in ((one, one.shape[0]) if storage.apart else (one,))]
        arguments = (*stored(op.ins[:count], ctx), *amax, *op.outs, *copied, *shape(op))
        return ctx.call(getattr(import_module(module), op.kind), *arguments, DTYPES[op.attrs["dtype"]].code)

    return tuple(
        KernelDef(op=definition.kind, dtypes=("*", "..."), supports=supports, bind=bind, module=module)
        for definition in storage.ops[1:]
    )
