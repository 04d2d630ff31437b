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
    return tuple(matrix for matrices in matrices_of(stored) for matrix in matrices)


def matrices_of(stored: WeightMap) -> list[tuple[Matrix, ...]]:
    """Return the matrices of each tensor of a weight map that `checked_weight_maps` has checked."""
    rows = [tensor.rows[0] for tensor in stored.tensors]
    each = sum(rows) // stored.matrices
    found = []
    for tensor, height in zip(stored.tensors, rows, strict=True):
        count = 1 if stored.matrices == 1 else height // each
        names = [f"{tensor.name}.{i}" for i in range(count)] if count > 1 else [tensor.name]
        found.append(tuple(Matrix(name, height // count) for name in names))
    return found


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
    with blaming(inputs.model.origin, "published_weights"):
        for form in inputs.model.published_weights(inputs.dims):
            _check(f"model {inputs.model.name}, published", tuple(form), params)
    tensors = {t.name for m in maps for t in m.tensors}
    copies = inputs.model.tied_copies(inputs.dims)
    if unknown := sorted({*copies.values()} - tensors) or sorted(copies.keys() & tensors):
        names = "must map further names to tensors of `weights`"
        raise inputs.model.failed("tied_copies", f"returned {copies!r:.200}: {unknown[0]} is wrong; it {names}")
    for pattern in inputs.model.kept_tensors(inputs.dims):
        if named := sorted(name for name in tensors | copies.keys() if fnmatchcase(name, pattern)):
            what = f"returned {pattern!r}, which {named[0]} of `weights` matches: the program computes with it"
            raise inputs.model.failed("kept_tensors", what)
    if strange := sorted({*inputs.model.may_lack(inputs.dims)} - {*inputs.model.kept_tensors(inputs.dims)}):
        raise inputs.model.failed("may_lack", f"returned {strange[0]!r}, which is no pattern of `kept_tensors`")
    return maps


def _check(model: str, maps: Sequence[WeightMap], params: dict[str, Value]) -> None:
    mapped = Counter(m.param for m in maps)
    if mapped.keys() != params.keys():
        raise ProgramError(f"{model}: weight maps and params differ: {sorted(mapped.keys() ^ params.keys())}")
    sources = Counter(t.name for m in maps for t in m.tensors)
    parameters = Counter(m.parameter for m in maps if m.parameter)
    twice = [name for counts in (mapped, sources, parameters) for name, count in counts.items() if count > 1]
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
        if m.parameter and len(shape) != 2:
            raise ProgramError(f"{model}: {m.param} {list(shape)} is parameter={m.parameter!r}, which matrices can be")
        stored = [_rows(model, t) for t in m.tensors]
        if any(s[1:] != shape[1:] for s in stored) or sum(s[0] for s in stored) != shape[0]:
            parts = " + ".join(str(list(s)) for s in stored) or "nothing"
            raise ProgramError(f"{model}: {m.param} is {list(shape)}, its checkpoint tensors make {parts}")


def _check_matrices(model: str, stored: WeightMap, param: Value, declared: int) -> None:
    """Raise ProgramError if a weight map does not make the matrices that it names, or the param is declared as other
    ones."""
    if stored.matrices == 1 and declared == 1:
        return
    rows, n = [tensor.rows[0] for tensor in stored.tensors], stored.matrices
    held = f"its checkpoint tensors have {', '.join(map(str, rows))} rows"
    shape = list(param.shape)
    if n != 1:
        if n < 1 or len(shape) != 2 or shape[0] % n:
            raise ProgramError(
                f"{model}: {param.name} {shape} has a weight map with matrices={n}, which does not divide its rows. "
                "Name how many matrices of equal rows the param consists of."
            )
        if any(height % (shape[0] // n) for height in rows):
            raise ProgramError(
                f"{model}: {param.name} {shape} has a weight map with matrices={n}, which are of {shape[0] // n} rows, "
                f"and {held}: a matrix would be in two tensors. Name a number of which each tensor holds whole ones."
            )
    found = [matrix.rows for matrices in matrices_of(stored) for matrix in matrices]
    if declared > 1 and found != declared * [shape[0] // declared]:
        raise ProgramError(
            f"{model}: {param.name} {shape} is declared with matrices={declared}, and {held}, which are "
            f"{len(found)} matrices by its weight map. Leave matrices out of b.param, or say the number in the map: "
            "WeightMap(..., matrices=)."
        )


def _rows(model: str, tensor: HFTensor) -> tuple[int, ...]:
    try:
        rows = tensor.rows
        if tensor.leading and (len(rows) != 2 or rows[0] % tensor.shape[0]):
            raise ProgramError(f"its layout has leading=True and {list(rows)}, which are no rows of each index")
        return rows
    except ProgramError as error:
        raise ProgramError(f"{model}: {tensor.name} {list(tensor.shape)}: {error}") from None
