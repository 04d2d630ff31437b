"""Tests of an op by its OpDef: shape rule and torch reference agree, and the reference has no side effects.

(y,) = check_op(SQUARED_RELU, torch.randn(5, 64))
assert torch.equal(y, ...)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from ..api import IN_OUTPUTS, Op, OpDef, OutSpec, Value
from ..dtypes import DTYPES
from ..reference.ops import load
from ..reference.rounding import TORCH_DTYPES
from .kernels import same_bits

_NAMES = {dtype: name for name, dtype in TORCH_DTYPES.items()}


@dataclass(frozen=True)
class Elements:
    """A tensor of elements of `dtype`, where its torch dtype stands for another one: "e2m1", two to a byte."""

    tensor: Tensor
    dtype: str


def as_inputs(ins: Sequence[Tensor | Elements]) -> dict[Value, Tensor]:
    """Return the input values of an op, and what they hold."""
    held = [x if isinstance(x, Elements) else Elements(x, _NAMES[x.dtype]) for x in ins]
    return {
        Value(f"in{i}", DTYPES[x.dtype].shape_of(tuple(x.tensor.shape)), x.dtype, "act"): x.tensor
        for i, x in enumerate(held)
    }


def check_op(definition: OpDef, *ins: Tensor | Elements, **attrs: Any) -> tuple[Tensor, ...]:
    """Call the reference of an op as a run does. Return its outputs, then the inputs that it changes.

    Raises AssertionError unless
    - the op declares the keywords of its reference as attributes, with the same defaults, and `attrs` are such
    - its reference has its optional inputs (`OpDef.optional`) under their names, at their places, with a default
    - the number, shapes and dtypes of the outputs are those of the shape rule, and of the changed inputs their own
    - the bits of its inputs are unchanged (a run detects only in-place operations of torch)
    - a second call with the same inputs is bit-identical
    - an op that computes each row by itself (`OpDef.row_wise`) gives the same rows, sums and maxima, but for rounding,
      in two parts. Not for ops that take what is about their rows alone, which only a run has, nor for such outputs
    """
    check_declared_attrs(definition)
    check_optional_inputs(definition)
    definition.check_attrs(attrs)
    inputs = as_inputs(ins)
    values, tensors = tuple(inputs), tuple(inputs.values())
    changed = [values[i] for i in definition.changes(values, attrs)]
    specs = [*definition.infer(values, attrs), *(OutSpec(v.name, v.shape, v.dtype) for v in changed)]
    before = [x.clone() for x in tensors]
    outs = _call(definition, tensors, attrs)
    _check_inputs(definition, tensors, before)
    assert len(outs) == len(specs), f"{definition.kind}: {len(outs)} outputs, but {len(specs)} in the shape rule"
    for spec, out in zip(specs, outs, strict=True):
        dtype = DTYPES[spec.dtype]
        found = tuple(out.shape), out.dtype
        expected = dtype.stored_shape(tuple(spec.shape)), TORCH_DTYPES[spec.dtype]
        assert found == expected, f"{definition.kind}: {spec.label} is {found}, but {expected} in the shape rule"
    kept = [out.clone() for out in outs]
    for spec, first, second in zip(specs, kept, _call(definition, tensors, attrs), strict=True):
        assert same_bits(first, second), f"{definition.kind}: a second call changes {spec.label}"
    _check_inputs(definition, tensors, before)
    _check_rows(definition, Op(definition.kind, values, (), attrs), specs, tensors, kept)
    return tuple(kept)


def _check_rows(
    definition: OpDef, op: Op, specs: Sequence[OutSpec], ins: Sequence[Tensor], outs: Sequence[Tensor]
) -> None:
    changed = len(definition.changes(op.ins, op.attrs))
    made = specs[: len(specs) - changed]
    found = definition.row_wise(replace(op, outs=tuple(Value(s.label, s.shape, s.dtype, "act") for s in made)))
    count = ins[found.ins[0]].shape[0] if found and found.ins else 0
    if found is None or count < 2 or found.takes or found.together:
        return
    cut = count // 3 or 1
    per = [x.shape[0] // count if i in found.ins else 0 for i, x in enumerate(ins)]
    first, second = (
        _call(
            definition,
            tuple(x[k * a : k * b] if k else x for k, x in zip(per, ins, strict=True)),
            {**op.attrs, found.first: a} if found.first else dict(op.attrs),
        )
        for a, b in ((0, cut), (cut, count))
    )
    assert {*found.outs, *found.sums, *found.local} == {*range(len(outs) - changed)} and len(
        found.largest
    ) == changed, f"{definition.kind}: row_wise leaves out an output, or an input that it changes"
    for i, whole in enumerate(outs):
        if i in found.local:
            continue
        a, b = first[i], second[i]
        is_largest = i >= len(outs) - changed
        parts = torch.maximum(a, b) if is_largest else a + b if i in found.sums else torch.cat((a, b))
        what = f"{definition.kind}: row_wise: {specs[i].label} of rows 0 to {cut} and {cut} to {count}"
        assert parts.shape == whole.shape, f"{what} is {list(parts.shape)}, of all {list(whole.shape)}"
        kind = whole.dtype if whole.is_floating_point() and whole.dtype.itemsize > 1 else torch.float32
        largest = whole.double().abs().where(whole.double().isfinite(), 0).max() if whole.numel() else 0.0
        close = torch.isclose(
            parts.double(), whole.double(), rtol=0, atol=float(largest * torch.finfo(kind).eps * 16), equal_nan=True
        )
        assert bool(close.all()), f"{what} is not that of all"


def check_declared_attrs(definition: OpDef) -> None:
    """Raise AssertionError unless the attributes of an op are the keywords of its reference, with the same defaults.

    A reference with `**attrs` takes any. That of a `positioned` op takes `firsts` besides.
    """
    parameters = signature(load(definition.reference)).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return
    keywords = {p.name: () if p.default is p.empty else (p.default,) for p in parameters if p.kind is p.KEYWORD_ONLY}
    if definition.positioned:
        firsts = keywords.pop("firsts", ())
        assert firsts, f"{definition.kind} is positioned, but its reference has no keyword firsts with a default"
    declared = {
        name: ((None if of[1] is IN_OUTPUTS else of[1]),) if isinstance(of, tuple) else ()
        for name, of in definition.attrs.items()
    }
    assert declared == keywords, f"{definition.kind}: attributes {declared}, but its reference has {keywords} after *"


def check_optional_inputs(definition: OpDef) -> None:
    """Raise AssertionError unless the optional inputs of an op are parameters of its reference that have a default."""
    parameters = [p for p in signature(load(definition.reference)).parameters.values() if p.kind is not p.KEYWORD_ONLY]
    for name, index in definition.optional.items():
        found = parameters[index] if 0 <= index < len(parameters) else None
        assert found and found.name == name and found.default is not found.empty, (
            f"{definition.kind}: input {index} is the optional {name}, but its reference has "
            f"({', '.join(map(str, parameters))})"
        )


def _call(definition: OpDef, ins: tuple[Tensor, ...], attrs: dict[str, Any]) -> tuple[Tensor, ...]:
    results = load(definition.reference)(*ins, **attrs)
    return results if isinstance(results, tuple) else (results,)


def _check_inputs(definition: OpDef, ins: tuple[Tensor, ...], before: list[Tensor]) -> None:
    for i, (x, was) in enumerate(zip(ins, before, strict=True)):
        assert same_bits(x, was), f"{definition.kind}: its reference wrote to input {i}; it must return new tensors"
