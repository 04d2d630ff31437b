"""A single matrix in a weight format, by the references of the format's ops, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surogate_core.api import HFTensor, Init, Matrix, Op, OpDef, ParamInfo, StorageContext, Value, WeightFormatDef
from surogate_core.errors import ProgramError
from surogate_core.program.builder import Builder
from surogate_core.reference.ops import load
from surogate_core.reference.rounding import TORCH_DTYPES


@dataclass(frozen=True)
class MatrixCodec:
    """Quantizes and dequantizes matrices. `dtype`: the model's dtype, of matrices before and after."""

    format: WeightFormatDef
    options: Any
    ops: Mapping[str, OpDef]
    dtype: str

    def quantized(self, tensor: HFTensor, weight: Tensor) -> list[Tensor]:
        """Return the states that hold `weight`."""
        param, states, ops, _, _ = self._recorded(tensor)
        known = _run(ops, {param: tensor.load(weight.to(TORCH_DTYPES[self.dtype])).contiguous()}, self.ops)
        return [known[state] for state in states]

    def dequantized(self, tensor: HFTensor, states: Sequence[Tensor]) -> Tensor:
        """Return the matrix that `states` hold, in the layout of the checkpoint."""
        _, values, _, ops, result = self._recorded(tensor)
        return tensor.save(_run(ops, dict(zip(values, states, strict=True)), self.ops)[result])

    def rounded(self, tensor: HFTensor, weight: Tensor) -> Tensor:
        """Return what training with the weight stored in the format computes with."""
        return self.dequantized(tensor, self.quantized(tensor, weight))

    def _recorded(self, tensor: HFTensor) -> tuple[Value, Sequence[Value], Sequence[Op], Sequence[Op], Value]:
        """Return the param, the states that hold it, the ops that write them, and those that yield the last value."""
        b = Builder(self.ops, self.dtype)
        param = b.param(tensor.name, tensor.rows, Init())
        info = ParamInfo(param=param, of_model=True, kind="matrix", matrices=(Matrix(tensor.name, tensor.rows[0]),))
        context = StorageContext(builder=b, param=info, options=self.options)
        with b.record("derive") as writing:
            states = self.format.quantize(context)
        with b.record("forward") as reading:
            result = self.format.dequantize(states, context)
        return param, states, writing, reading, result


def _run(ops: Sequence[Op], known: dict[Value, Tensor], definitions: Mapping[str, OpDef]) -> dict[Value, Tensor]:
    with torch.no_grad():
        for op in ops:
            function: Callable[..., Tensor | tuple[Tensor, ...]] = load(definitions[op.kind].reference)
            results = function(*(known[value] for value in op.ins), **op.attrs)
            outs = results if isinstance(results, tuple) else (results,)
            if len(outs) != len(op.outs):
                raise ProgramError(
                    f"{op.kind} ({op.where}): its reference returned {len(outs)} of {len(op.outs)} results"
                )
            known |= zip(op.outs, outs, strict=True)
    return known
