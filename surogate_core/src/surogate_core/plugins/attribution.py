"""Wraps the functions of a plugin's definitions so that their errors name the plugin.

The registry wraps each definition once, when the registry is built. Not wrapped are: definitions of surogate-core,
whose errors are ours; `KernelDef.bind`, whose errors `runtime/bind.py` attributes; `AdapterDef.check`, which returns an
exception; and launches of kernels, which run in every step.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import fields, is_dataclass, replace
from typing import Any, Final, TypeVar

from ..api import Definition, Encoded, Family, Logger, Merge, OutSpec, Precision, Program, Support, Value, WeightMap
from ..dtypes import DTYPES
from ..errors import ProgramError, SurogateError
from ..origin import Origin

D = TypeVar("D", bound=Definition)

Check = Callable[[Any, Sequence[Any]], str]
"""(result, arguments of the call) -> what was expected instead; "" if the result is valid."""


def attributed(definition: D, origin: Origin) -> D:
    """Return the definition with its origin and wrapped functions. One that already has an origin is returned as is."""
    return definition if definition.origin is not None else replace(_with_wrapped(definition, origin), origin=origin)


def _with_wrapped(part: Any, origin: Origin, path: str = "") -> Any:
    """Wrap the functions of a definition, or of a dataclass in it: `path` is then the name of its field and a dot."""
    wrapped: dict[str, Any] = {}
    for field in fields(part):
        value, function = getattr(part, field.name), path + field.name
        if is_dataclass(value):
            wrapped[field.name] = _with_wrapped(value, origin, f"{function}.")
        elif value is not None and (origin.kind, function) in RESULTS:
            wrapped[field.name] = _wrapped(origin, function, value)
    return replace(part, **wrapped)


def _wrapped(origin: Origin, function: str, call: Callable[..., Any]) -> Callable[..., Any]:
    if (origin.kind, function) == ("launcher", "run"):
        return _wrapped_launcher(origin, call)
    check = RESULTS[origin.kind, function]
    # A shape rule raises ProgramError for invalid inputs: the code that emits the op is at fault.
    callers_fault = (origin.kind, function) == ("op", "infer")

    @functools.wraps(call)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        try:
            result = call(*args, **kwargs)
            expected = check(result, args)
        except ProgramError as error:
            if callers_fault:
                raise
            raise origin.failed(function, error) from error
        except SurogateError:
            raise
        except SystemExit as error:
            if error.code:  # raised by a signal handler, at any point
                raise
            raise origin.failed(function, error) from error
        except Exception as error:
            raise origin.failed(function, error) from error
        if expected:
            raise origin.failed(function, f"returned {_shown(result)}, expected {expected}")
        return _wrapped_merge(origin, result) if isinstance(result, Merge) else result

    return wrapper


def _wrapped_merge(origin: Origin, merge: Merge) -> Merge:
    """Wrap the functions that an adapter's `merge` returns. They run later, for each tensor."""

    def wrap(name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(call)
        def wrapper(*args: Any) -> Any:
            try:
                return call(*args)
            except SurogateError:
                raise
            except Exception as error:
                raise origin.failed(name, error) from error

        return wrapper

    changes = {tensor: wrap(f"merge of {tensor}", change) for tensor, change in merge.changes.items()}
    return replace(merge, changes=changes, check=wrap("merge", merge.check))


def _wrapped_launcher(origin: Origin, run: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `run` of a launcher. Errors of the work that it runs pass through; its own errors name the plugin."""

    @functools.wraps(run)
    def wrapper(work: Callable[[Any], Any], topology: Any, options: Any) -> Any:
        results: list[Any] = []
        raised: list[BaseException] = []

        def watched(comms: Any) -> Any:
            try:
                if not isinstance(comms, Sequence) or not comms:
                    raise origin.failed("run", f"called its work with {_shown(comms)}, expected one Comm per device")
                results.append(work(comms))
            except BaseException as error:
                raised.append(error)
                raise
            return results[-1]

        try:
            answer = run(watched, topology, options)
        except Exception as error:
            if isinstance(error, SurogateError) or error in raised:
                raise
            if raised and (error.__context__ is raised[-1] or error.__cause__ is raised[-1]):
                raise raised[-1] from error  # the first error is the cause
            raise origin.failed("run", error) from error
        if raised:
            raise origin.failed(
                "run", f"returned {_shown(answer)} although its work raised {type(raised[-1]).__name__}"
            )
        if answer is None or (results and answer is not results[-1]):
            raise origin.failed("run", f"returned {_shown(answer)}, expected what its work returned")
        return answer

    return wrapper


def _shown(value: Any) -> str:
    """Return a value for a message: its repr if it is plain, otherwise its type."""
    if value is None or isinstance(value, bool | int | float | str | Value | tuple | list):
        text = repr(value)
        return text if len(text) <= 80 else f"{text[:77]}..."
    return f"a {type(value).__name__}" if not isinstance(value, type) else f"the class {value.__name__}"


# --------------------------------------------------------------------------------------------------------------- checks


def _anything(result: Any, args: Sequence[Any]) -> str:
    return ""


def _a(cls: Any, words: str = "") -> Check:
    expected = words or f"a {cls.__name__}"
    return lambda result, args: "" if isinstance(result, cls) else expected


def _many(cls: type, words: str) -> Check:
    """Return the check for a sequence of `cls`. Text and iterators are not accepted."""

    def check(result: Any, args: Sequence[Any]) -> str:
        fits = isinstance(result, Sequence) and not isinstance(result, str | bytes)
        return "" if fits and all(isinstance(item, cls) for item in result) else words

    return check


def _error(result: Any, args: Sequence[Any]) -> str:
    return "" if isinstance(result, float) and 0 <= result < 1 else "a float of at least 0 and below 1"


def _count(result: Any, args: Sequence[Any]) -> str:
    return "" if type(result) is int and result >= 0 else "an int of at least 0"


def _dims(result: Any, args: Sequence[Any]) -> str:
    for name in ("vocab_size", "n_layers", "max_positions"):
        value = getattr(result, name, None)
        if type(value) is not int or value < 1:
            return f"Dims, whose {name} is an int of at least 1 (found {_shown(value)})"
    return ""


def _loss(result: Any, args: Sequence[Any]) -> str:
    losses = result if isinstance(result, list | tuple) and result else [result]
    fits = all(isinstance(loss, Value) and loss.shape == () for loss in losses)
    return "" if fits else "the loss, a Value of shape [], or several"


def _specs(result: Any, args: Sequence[Any]) -> str:
    if not isinstance(result, list | tuple):
        return "a list of OutSpec"
    for spec in result:
        if not isinstance(spec, OutSpec):
            return "a list of OutSpec"
        if spec.dtype not in DTYPES:
            return f"dtypes among {', '.join(DTYPES)}"
        if not all(type(size) is int for size in spec.shape):
            return "shapes of ints"
    return ""


def _one_each(what: str) -> Check:
    """Return the check for a Value or None per input or output of the op, which is the second argument of the call."""

    def check(result: Any, args: Sequence[Any]) -> str:
        op = args[1]
        values = op.ins if what == "input" else op.outs
        fits = isinstance(result, list | tuple) and len(result) == len(values)
        if fits and all(value is None or isinstance(value, Value) for value in result):
            return ""
        return f"a Value or None for each of the {len(values)} {what}s of {op.kind}"

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
    fits = isinstance(result, list | tuple) and all(type(i) is int and 0 <= i < count for i in result)
    return "" if fits else f"a list of indices of inputs, at least 0 and below {count}"


def _overwritten(result: Any, args: Sequence[Any]) -> str:
    outs, ins = len(args[0].outs), len(args[0].ins)
    fits = isinstance(result, Mapping) and all(out in range(outs) and i in range(ins) for out, i in result.items())
    return "" if fits else f"a mapping of indices of the {outs} outputs to indices of the {ins} inputs"


def _copies(result: Any, args: Sequence[Any]) -> str:
    words = f"None or a Value for each of the outputs {list(args[5])}"
    if result is None:
        return ""
    fits = isinstance(result, list | tuple) and len(result) == len(args[5])
    return "" if fits and all(isinstance(value, Value) for value in result) else words


def _precision(result: Any, args: Sequence[Any]) -> str:
    if not isinstance(result, Precision):
        return "a Precision"
    wrong = [field.name for field in fields(result) if getattr(result, field.name) not in DTYPES]
    return f"dtypes among {', '.join(DTYPES)} for {', '.join(wrong)}" if wrong else ""


def _support(result: Any, args: Sequence[Any]) -> str:
    return "" if isinstance(result, Support) and isinstance(result.ok, bool) else "a Support"


def _commands(result: Any, args: Sequence[Any]) -> str:
    words = "(program, line) pairs"
    if not isinstance(result, list | tuple):
        return words
    pairs = all(isinstance(pair, tuple) and [type(text) for text in pair] == [str, str] for pair in result)
    return "" if pairs else words


_NAMES = _many(str, "a list of names")


def _names_or_none(result: Any, args: Sequence[Any]) -> str:
    return "" if result is None or not _NAMES(result, args) else "a list of names, or None"


RESULTS: Final[Mapping[tuple[str, str], Check]] = {
    ("model", "dims"): _dims,
    ("model", "build"): _loss,
    ("model", "weights"): _many(WeightMap, "a list of WeightMap"),
    ("model", "ignored_tensors"): _NAMES,
    ("model", "tied_copies"): _a(Mapping, "a mapping of names"),
    ("op", "infer"): _specs,
    ("op", "changes"): _inputs,
    ("op", "may_overwrite"): _overwritten,
    ("op", "vjp"): _gradients,
    ("op", "rematerialise"): _one_each("output"),
    ("op", "recomputing"): _a(str, "the name of a kind, or an empty one"),
    ("op", "adding"): _a(str, "the name of a kind, or an empty one"),
    ("op", "flops"): _count,
    ("op", "traffic"): _count,
    ("op", "passes"): _count,
    ("op", "link"): _count,
    ("op", "math"): _a(str, "the name of a rate"),
    ("op", "workspace"): _count,
    ("kernel", "supports"): _support,
    ("kernel", "workspace"): _count,
    ("kernel", "notice"): _a(str, "text"),
    ("recipe", "precision"): _precision,
    ("recipe", "supports"): _support,
    ("recipe", "lower"): _a(Family),
    ("recipe", "reads_amax"): _a(bool, "True or False"),
    ("recipe", "product_error"): _error,
    ("lowering", "supports"): _support,
    ("lowering", "lower"): _a(Family),
    ("lowering", "product_error"): _error,
    ("adapter", "apply"): _a(Program),
    ("adapter", "fuse"): _a(Program),
    ("adapter", "trainable"): _a(bool, "True or False"),
    ("adapter", "save"): _anything,
    ("adapter", "load"): _a(Mapping, "a mapping of tensors by name"),
    ("adapter", "merge"): _a(Merge),
    ("adapter", "commands"): _commands,
    ("optimizer", "update"): _anything,
    ("weight format", "quantize"): _many(Value, "a list of states"),
    ("weight format", "dequantize"): _a(Value),
    ("weight format", "copies"): _copies,
    ("weight format", "supports"): _support,
    ("weight format", "checkpoints.matches"): _a(bool, "True or False"),
    ("weight format", "checkpoints.check"): _anything,
    ("weight format", "checkpoints.kept"): _names_or_none,
    ("weight format", "checkpoints.parts"): _NAMES,
    ("weight format", "checkpoints.load"): _a((list, tuple), "a list of tensors"),
    ("weight format", "checkpoints.save"): _a(Mapping, "a mapping of tensors by name"),
    ("weight format", "checkpoints.config"): _a(Mapping, "a mapping of keys"),
    ("weight format", "checkpoints.notice"): _a(str, "text"),
    ("offload", "selected"): _a(bool, "True or False"),
    ("offload", "on_host"): _a(Iterable, "params and states"),
    ("offload", "schedule"): _a(Family),
    ("format", "matches"): _a(bool, "True or False"),
    ("format", "fields"): _NAMES,
    ("format", "optional"): _NAMES,
    ("format", "encode"): _a(Encoded, "an Encoded"),
    ("format", "guess"): _a(Mapping, "a mapping of keys"),
    ("launcher", "run"): _anything,  # see `_wrapped_launcher`
    ("logger", "open"): _a(Logger),
}
"""The check of the result of each function, by kind of definition and function."""

UNWRAPPED: Final = frozenset({("kernel", "bind"), ("adapter", "check")})
"""Functions whose errors are handled elsewhere: see the top of this file."""
