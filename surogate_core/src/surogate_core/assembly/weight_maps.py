"""The model's map from checkpoint tensors to params, checked; the kind of each param and its logical matrices."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from fnmatch import fnmatchcase

from ..api import HFTensor, Matrix, WeightMap
from ..errors import ProgramError
from ..origin import blaming
from ..program.op import Program
from ..program.opdef import OpDef, ParamKind
from ..program.value import Value
from .inputs import PlanInputs


def special_kinds(program: Program, ops: Mapping[str, OpDef]) -> dict[Value, ParamKind]:
    """Return the kinds that ops of `program` declare for the params that they read (`OpDef.param_kinds`).

    If several ops read a param, the first one that declares a kind decides.
    """
    kinds: dict[Value, ParamKind] = {}
    for op in program.ops:
        for i, kind in ops[op.kind].param_kinds.items():
            if i < len(op.ins):  # an optional input may be absent
                kinds.setdefault(op.ins[i], kind)
    return kinds


def param_kind(param: Value, stored: WeightMap | None) -> ParamKind:
    """Return the kind of a param for which no op declares one."""
    return (stored and stored.kind) or ("vector" if len(param.shape) < 2 else "matrix")


def logical_matrices(param: Value, stored: WeightMap | None, declared: int) -> tuple[Matrix, ...]:
    """Return the matrices of `param`: of its weight map if it is a weight of the model, else as many as `declared`."""
    if len(param.shape) != 2:
        return ()
    if stored is None:
        names = [f"{param.name}.{i}" for i in range(declared)] if declared > 1 else [param.name]
        return tuple(Matrix(name, param.shape[0] // declared) for name in names)
    return tuple(Matrix(tensor.name, tensor.rows[0]) for tensor in stored.tensors)


def checked_weight_maps(
    inputs: PlanInputs, declared: Sequence[Value], stack_of: Callable[[Value], int]
) -> tuple[WeightMap, ...]:
    """Return the model's weight maps. Raise ProgramError unless they cover the model's params exactly, with shapes.

    `stack_of`: how many matrices a param was declared with (`Builder.stack_of`).
    """
    maps = tuple(inputs.model.weights(inputs.dims))
    params = {v.name: v for v in declared if v.role == "param"}
    with blaming(inputs.model.origin, "weights"):
        _check(f"model {inputs.model.name}", maps, params)
        for m in maps:
            _check_matrices(f"model {inputs.model.name}", m, params[m.param], stack_of(params[m.param]))
    tensors = {t.name for m in maps for t in m.tensors}
    copies = inputs.model.tied_copies(inputs.dims)
    if unknown := sorted({*copies.values()} - tensors) or sorted(copies.keys() & tensors):
        names = "must map further names to tensors of `weights`"
        raise inputs.model.failed("tied_copies", f"returned {copies!r:.200}: {unknown[0]} is wrong; it {names}")
    for pattern in inputs.model.kept_tensors(inputs.dims):
        if named := sorted(name for name in tensors | copies.keys() if fnmatchcase(name, pattern)):
            what = f"returned {pattern!r}, which {named[0]} of `weights` matches: the program computes with it"
            raise inputs.model.failed("kept_tensors", what)
    return maps


def _check(model: str, maps: Sequence[WeightMap], params: dict[str, Value]) -> None:
    mapped = Counter(m.param for m in maps)
    if mapped.keys() != params.keys():
        raise ProgramError(f"{model}: weight maps and params differ: {sorted(mapped.keys() ^ params.keys())}")
    sources = Counter(t.name for m in maps for t in m.tensors)
    twice = [name for counts in (mapped, sources) for name, count in counts.items() if count > 1]
    if twice:
        raise ProgramError(f"{model}: mapped twice: {', '.join(twice)}")
    for m in maps:
        if m.new and not m.trained:
            raise ProgramError(f"{model}: {m.param} is new=True, so it has to be trained, and trained=False")
        shape = params[m.param].shape
        if m.precise and (len(shape) != 2 or params[m.param].block < 0 or m.kind not in (None, "matrix")):
            what = f"{list(shape)}" + ("" if params[m.param].block >= 0 else " outside of blocks")
            kind = "" if m.kind is None else f" of the kind {m.kind!r}"
            raise ProgramError(f"{model}: {m.param} {what}{kind} is precise=True, which matrices of blocks can be")
        stored = [_rows(model, t) for t in m.tensors]
        if any(s[1:] != shape[1:] for s in stored) or sum(s[0] for s in stored) != shape[0]:
            parts = " + ".join(str(list(s)) for s in stored) or "nothing"
            raise ProgramError(f"{model}: {m.param} is {list(shape)}, its checkpoint tensors make {parts}")


def _check_matrices(model: str, stored: WeightMap, param: Value, declared: int) -> None:
    """Raise ProgramError if a param is declared as other matrices than the tensors of its weight map."""
    rows = [tensor.rows[0] for tensor in stored.tensors]
    if declared > 1 and rows != declared * [param.shape[0] // declared]:
        raise ProgramError(
            f"{model}: {param.name} {list(param.shape)} is declared with matrices={declared}, and its checkpoint "
            f"tensors have {', '.join(map(str, rows))} rows. Each tensor of a weight map is one matrix: leave matrices "
            "out, or name one tensor for each."
        )


def _rows(model: str, tensor: HFTensor) -> tuple[int, ...]:
    try:
        return tensor.rows
    except ProgramError as error:
        raise ProgramError(f"{model}: {tensor.name} {list(tensor.shape)}: {error}") from None
