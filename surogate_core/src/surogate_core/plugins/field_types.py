"""Whether a value is what an annotation of a definition says, by pydantic in strict mode."""

from __future__ import annotations

import sys
from functools import cache
from typing import Any, Final, get_args, get_type_hints

from pydantic import TypeAdapter, ValidationError

from ..origin import STRICT
from ..program.builder import Builder

_NAMES: Final = {"Builder": Builder, "Tensor": Any}
"""Names in annotations that are not imported at run time. Torch is not imported to check a value."""

_WORDS: Final = {
    "callable": "a function",
    "a string": "text",
    "a integer": "an int",
    "an instance of Sequence": "a list",
}
"""Expectations of pydantic, as messages word them."""


def wrong_field(cls: type, value: object) -> str:
    """Return which field of an instance of `cls` has a wrong value, and what is expected; "" if none has."""
    return _misfit(_of_class(cls), value, cls.__name__)


def wrong_result(cls: type, function: str, result: object) -> str:
    """Return what is wrong with a result of the function that a field of `cls` holds; "" if nothing is."""
    return _misfit(_of_result(cls, function), (result,), "")


@cache
def _of_class(cls: type) -> TypeAdapter[Any]:
    return _complete(TypeAdapter(cls), cls)


@cache
def _of_result(cls: type, function: str) -> TypeAdapter[Any]:
    """The result is validated as a tuple of one, because `config` cannot be given for a dataclass."""
    hint = get_type_hints(cls, localns=_NAMES, include_extras=True)[function]
    call = hint if isinstance(get_args(hint)[0], list) else get_args(hint)[0]  # of Callable[...] | None
    return _complete(TypeAdapter(tuple[get_args(call)[-1]], config=STRICT), cls)  # type: ignore[misc, arg-type]


def _complete(adapter: TypeAdapter[Any], cls: type) -> TypeAdapter[Any]:
    if not adapter.pydantic_complete:
        adapter.rebuild(_types_namespace=_NAMES | vars(sys.modules[cls.__module__]))
    return adapter


def _misfit(adapter: TypeAdapter[Any], value: object, place: str) -> str:
    try:
        adapter.validate_python(value)
    except ValidationError as error:
        first, *others = error.errors(include_url=False)
        either = [first, *(other for other in others if other["input"] is first["input"])]  # of a union
        expected = f"expected {' or '.join(dict.fromkeys(_words(e['msg']) for e in either))}"
        inside = ".".join(map(str, first["loc"] if place else first["loc"][1:]))
        if place:
            return f"{place}.{inside} is {first['input']!r:.80}, {expected}"
        return f"whose {inside} is {first['input']!r:.80}, {expected}" if inside and len(either) == 1 else expected
    return ""


def _words(message: str) -> str:
    """Return what a message of pydantic expects."""
    words = message.removeprefix("Value error, ").removeprefix("Input should be ").replace(" valid ", " ")
    return _WORDS.get(words, words)
