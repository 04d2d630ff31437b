"""A single matrix in a weight format, by the references of the format's ops, on the CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from surogate_core.api import (
    HFTensor,
    Init,
    Matrix,
    Op,
    OpDef,
    ParamInfo,
    StorageContext,
    Value,
    WeightFormatDef,
    WeightMap,
)
from surogate_core.assembly.weight_maps import matrices_of
from surogate_core.errors import ProgramError
from surogate_core.program.builder import Builder
from surogate_core.reference.ops import load
from surogate_core.reference.rounding import TORCH_DTYPES


@dataclass(frozen=True)
class Matrices:
    """A tensor of a checkpoint and the matrices that it holds, each as a tensor of rows of the param.

    Several are a stack, and have names of their own: those of the tensor with ".0", ".1" and so on at the end.
    """

    tensor: HFTensor
    each: tuple[HFTensor, ...]

    def of(self, weight: Tensor) -> Iterator[tuple[HFTensor, Tensor]]:
        """Yield each matrix of the tensor with its rows."""
        rows = self.tensor.load(weight).split([matrix.shape[0] for matrix in self.each])
        yield from zip(self.each, rows, strict=True)


def matrices_in(m: WeightMap) -> list[Matrices]:
    """Return the matrices of each tensor of a weight map."""
    return [
        Matrices(tensor, tuple(HFTensor(matrix.name, (matrix.rows, *tensor.rows[1:])) for matrix in found))
        for tensor, found in zip(m.tensors, matrices_of(m), strict=True)
    ]


def by_matrix(m: WeightMap) -> WeightMap:
    """Return the map of files that hold each matrix by itself, as those in a weight format do."""
    return replace(m, tensors=tuple(matrix for held in matrices_in(m) for matrix in held.each), matrices=1)


@dataclass(frozen=True)
class MatrixCodec:
    """Quantizes and dequantizes matrices. `dtype`: the model's dtype, of matrices before and after."""

    format: WeightFormatDef
    options: Any
    ops: Mapping[str, OpDef]
    dtype: str

    def quantized(self, matrix: HFTensor, rows: Tensor) -> list[Tensor]:
        """Return the states that hold the rows of a matrix."""
        param, states, ops, _, _ = self._recorded(matrix)
        known = _run(ops, {param: rows.to(TORCH_DTYPES[self.dtype]).contiguous()}, self.ops)
        return [known[state] for state in states]

    def dequantized(self, matrix: HFTensor, states: Sequence[Tensor]) -> Tensor:
        """Return the rows of the matrix that `states` hold."""
        _, values, _, ops, result = self._recorded(matrix)
        return _run(ops, dict(zip(values, states, strict=True)), self.ops)[result]

    def rounded(self, held: Matrices, weight: Tensor) -> Tensor:
        """Return what training with a tensor stored in the format computes with, in the layout of the checkpoint."""
        found = [self.dequantized(matrix, self.quantized(matrix, rows)) for matrix, rows in held.of(weight)]
        return held.tensor.save(torch.cat(found))

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
