"""Wraps the functions of a plugin's definitions so that their errors name the plugin.

The registry wraps each definition once, when the registry is built. Not wrapped are: definitions of surogate-core,
whose errors are ours; `KernelDef.bind`, whose errors `runtime/bind.py` attributes; `AdapterDef.check`, which returns an
exception; and launches of kernels, which run in every step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final, TypeVar

from ..api import Definition, Head, Loss, Merge, Metric, Value
from ..dtypes import DTYPES
from ..errors import ProgramError, SurogateError
from ..origin import EMITTING, Origin
from .field_types import wrong_result

D = TypeVar("D", bound=Definition)

Check = Callable[[Any, Sequence[Any]], str]
"""(result, arguments of the call) -> what was expected instead; "" if the result is valid."""

UNWRAPPED: Final = frozenset({("kernel", "bind"), ("adapter", "check")})
"""Functions whose errors are handled elsewhere: see the top of this file."""


def attributed(definition: D, origin: Origin) -> D:
    """Return the definition with its origin and wrapped functions. One that already has an origin is returned as is."""
    return definition if definition.origin is not None else replace(_with_wrapped(definition, origin), origin=origin)


def _with_wrapped(part: Any, origin: Origin, path: str = "") -> Any:
    """Wrap the functions of a definition, or of a dataclass in it: `path` is then the name of its field and a dot."""
    wrapped: dict[str, Any] = {}
    for field in fields(part):
        value, function = getattr(part, field.name), path + field.name
        if value is field.default:
            continue  # core's own
        if is_dataclass(value):
            wrapped[field.name] = _with_wrapped(value, origin, f"{function}.")
        elif value is not None and field.type.startswith("Callable") and (origin.kind, function) not in UNWRAPPED:
            check = functools.partial(_wrong, origin.kind, function, type(part), field.name)
            wrapped[field.name] = _wrapped(origin, function, value, check)
    return replace(part, **wrapped)


def _wrapped(origin: Origin, function: str, call: Callable[..., Any], wrong: Check) -> Callable[..., Any]:
    # A shape rule raises ProgramError for invalid inputs: the code that emits the op is at fault.
    own = () if (origin.kind, function) == ("op", "infer") else ProgramError

    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        before = EMITTING.set(origin)
        try:
            result = call(*args, **kwargs)
            expected = wrong(result, args)
        except (Exception, SystemExit) as error:
            stops = isinstance(error, SystemExit) and error.code  # raised by a signal handler, at any point
            if stops or (isinstance(error, SurogateError) and not isinstance(error, own)):
                raise
            raise origin.failed(function, error) from error
        finally:
            EMITTING.reset(before)
        if expected:
            raise origin.failed(function, f"returned {_shown(result)}, {expected}")
        return _with_later_wrapped(origin, result)

    return wrapper


def _wrong(kind: str, function: str, cls: type, field: str, result: Any, args: Sequence[Any]) -> str:
    if wrong := wrong_result(cls, field, result):
        return wrong
    expected = _FITTING[kind, function](result, args) if (kind, function) in _FITTING else ""
    return expected and f"expected {expected}"


def _with_later_wrapped(origin: Origin, result: Any) -> Any:
    """Wrap functions in a result that run later: those of a `merge` for each tensor, those of metrics in each step."""

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        return _wrapped(origin, name, call, lambda result, args: "")

    if isinstance(result, Merge):
        changes = {tensor: wrap(f"merge of {tensor}", change) for tensor, change in result.changes.items()}
        return replace(result, changes=changes, check=wrap("merge", result.check))
    if isinstance(result, Metric):
        of, name = result.of, f"metric {result.name}"
        # `float` stays: it says that the value has the shape []
        of = of if of is float else wrap(name, lambda value: None if (n := result.of(value)) is None else float(n))
        return replace(result, of=of, doubt=wrap(f"doubt of {name}", result.doubt))
    if isinstance(result, Head | Loss):
        groups = {"terms", "metrics"} & vars(result).keys()
        later: dict[str, Any] = {g: [_with_later_wrapped(origin, one) for one in getattr(result, g)] for g in groups}
        return replace(result, **later)
    return result


def _shown(value: Any) -> str:
    """Return a value for a message: its repr if it is plain, otherwise its type."""
    if value is None or isinstance(value, bool | int | float | str | Value | tuple | list):
        text = repr(value)
        return text if len(text) <= 80 else f"{text[:77]}..."
    return f"a {type(value).__name__}" if not isinstance(value, type) else f"the class {value.__name__}"


# -------------------------------------------------------------------------------------------------- results in context


def _dims(result: Any, args: Sequence[Any]) -> str:
    for name in ("vocab_size", "n_layers", "max_positions"):
        value = getattr(result, name, None)
        if type(value) is not int or value < 1:
            return f"Dims, whose {name} is an int of at least 1 (found {_shown(value)})"
    return ""


def _head(result: Any, args: Sequence[Any]) -> str:
    x, weight = result.x, result.weight
    fits = len(x.shape) == len(weight.shape) == 2 and x.shape[1] == weight.shape[1]
    fits = fits and all(loss.shape == () for loss in result.losses) and all(map(_is_number, result.metrics))
    return "" if fits else "a Head of x [T, C], weight [V, C], losses [] and metrics of shape [], or any with Metric.of"


def _is_number(metric: Any) -> bool:
    return metric.value.dtype in ("fp32", "fp64") and (metric.value.shape == () or metric.of is not float)


def _loss(result: Any, args: Sequence[Any]) -> str:
    metrics = [*result.terms, *result.metrics]
    if not result.terms or not all(map(_is_number, metrics)) or any(term.value.shape for term in result.terms):
        return "a Loss of at least one term [], and metrics of shape [], or any with Metric.of, all in fp32"
    alone = [metric.value for metric in metrics if not metric.value.shape]  # several may be made of one array
    if len(set(alone)) < len(alone):
        return "terms and metrics with a value of their own"
    grouped = args[0].batch.group_scale is not None
    return "" if grouped or all(m.per == "token" for m in metrics) else "metrics per token: LossDef.group_size is 0"


def _one_each(what: str) -> Check:
    """Return the check for a Value or None per input or output of the op, which is the second argument of the call."""

    def check(result: Any, args: Sequence[Any]) -> str:
        op = args[1]
        count = len(op.ins if what == "input" else op.outs)
        return "" if len(result) == count else f"a Value or None for each of the {count} {what}s of {op.kind}"

    return check


def _gradients(result: Any, args: Sequence[Any]) -> str:
    op = args[1]
    if expected := _one_each("input")(result, args):
        return expected
    for i, (value, gradient) in enumerate(zip(op.ins, result, strict=True)):
        if gradient is None or not DTYPES[value.dtype].has_grad:
            continue
        if gradient.shape != value.shape or not DTYPES[gradient.dtype].has_grad:
            floats = ", ".join(name for name, dtype in DTYPES.items() if dtype.has_grad)
            return f"a gradient of input {i} of {op.kind} with its shape {list(value.shape)} in one of {floats}"
    return ""


def _inputs(result: Any, args: Sequence[Any]) -> str:
    count = len(args[0])
    return "" if all(0 <= i < count for i in result) else f"a list of indices of inputs, at least 0 and below {count}"


def _overwritten(result: Any, args: Sequence[Any]) -> str:
    outs, ins = len(args[0].outs), len(args[0].ins)
    fits = all(out in range(outs) and i in range(ins) for out, i in result.items())
    return "" if fits else f"a mapping of indices of the {outs} outputs to indices of the {ins} inputs"


def _copies(result: Any, args: Sequence[Any]) -> str:
    fits = result is None or len(result) == len(args[2])
    return "" if fits else f"None or a Value for each of the outputs {list(args[2])}"


_FITTING: Final[Mapping[tuple[str, str], Check]] = {
    ("model", "dims"): _dims,
    ("model", "configure"): _dims,
    ("model", "build"): _head,
    ("loss", "build"): _loss,
    ("op", "changes"): _inputs,
    ("op", "may_overwrite"): _overwritten,
    ("op", "vjp"): _gradients,
    ("op", "rewrites.rematerialize"): _one_each("output"),
    ("weight format", "copies"): _copies,
}
"""Checks of results against the arguments of the call, besides those of their types."""
