"""Whether a field of a definition holds what its annotation says.

Annotations are read as text: evaluating them would import what only type checkers need.
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Mapping, Sequence
from functools import lru_cache
from types import EllipsisType
from typing import Any, Final, get_args

from pydantic import BaseModel

from ..program.opdef import ParamKind

_PLAIN: Final[Mapping[str, tuple[tuple[type, ...], str]]] = {
    "str": ((str,), "text"),
    "int": ((int,), "an int"),
    "float": ((int, float), "a number"),
    "bool": ((bool,), "True or False"),
    "Any": ((object,), "anything"),
}
_CHOICES: Final[Mapping[str, tuple[str, ...]]] = {"ParamKind": get_args(ParamKind)}
"""Names that stand for a Literal."""


def expected(annotation: str, value: Any) -> str:
    """Return what a field should hold by its annotation, in words; "" if it holds that."""
    node = _parsed(annotation)
    return "" if _fits(node, value) else _words(node)


@lru_cache(maxsize=256)
def _parsed(annotation: str) -> ast.expr:
    return ast.parse(annotation, mode="eval").body


def _fits(node: ast.expr, value: Any) -> bool:
    match node:
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _fits(left, value) or _fits(right, value)
        case ast.Constant(value=None):
            return value is None
        case ast.Name(id=name) if name in _PLAIN:
            return isinstance(value, _PLAIN[name][0]) and (name in ("bool", "Any") or not isinstance(value, bool))
        case ast.Name(id=name) if name in _CHOICES:
            return value in _CHOICES[name]
        case ast.Name(id=name):
            return type(value).__name__ == name
        case ast.Subscript(value=ast.Name(id="Callable")):
            return callable(value)
        case ast.Subscript(value=ast.Name(id="type")):
            return isinstance(value, type) and issubclass(value, BaseModel)
        case ast.Subscript(value=ast.Name(id="Literal")):
            return value in _literals(node)
        case ast.Subscript(value=ast.Name(id="Mapping"), slice=ast.Tuple(elts=[keys, values])):
            return isinstance(value, Mapping) and all(_fits(keys, k) and _fits(values, v) for k, v in value.items())
        case ast.Subscript(
            value=ast.Name(id="tuple"), slice=ast.Tuple(elts=[item, ast.Constant(value=EllipsisType())])
        ):
            return isinstance(value, tuple | list) and all(_fits(item, v) for v in value)
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=items)):
            fits = isinstance(value, tuple | list) and len(value) == len(items)
            return fits and all(_fits(item, v) for item, v in zip(items, value, strict=True))
        case ast.Subscript(value=ast.Name(id="Sequence" | "Collection" as name), slice=item):
            kind = Sequence if name == "Sequence" else Collection
            return isinstance(value, kind) and not isinstance(value, str | bytes) and all(_fits(item, v) for v in value)
    raise TypeError(f"an annotation of a definition that is not checked: {ast.unparse(node)}")


def _words(node: ast.expr) -> str:
    match node:
        case ast.BinOp(left=left, right=right):
            return " or ".join(_words(part) for part in (left, right) if not _is_none(part))
        case ast.Name(id=name) if name in _PLAIN:
            return _PLAIN[name][1]
        case ast.Name(id=name) if name in _CHOICES:
            return f"one of {', '.join(_CHOICES[name])}"
        case ast.Subscript(value=ast.Name(id="Callable")):
            return "a function"
        case ast.Subscript(value=ast.Name(id="type")):
            return "a pydantic model (a class, not an instance)"
        case ast.Subscript(value=ast.Name(id="Literal")):
            return f"one of {', '.join(_literals(node))}"
        case ast.Subscript(value=ast.Name(id="Mapping"), slice=ast.Tuple(elts=[keys, values])):
            return f"a mapping of {_words(keys)} to {_words(values)}"
        case ast.Subscript(
            value=ast.Name(id="tuple"), slice=ast.Tuple(elts=[item, ast.Constant(value=EllipsisType())])
        ):
            return f"a tuple of {_words(item).replace('an int', 'ints')}"
        case ast.Subscript(value=ast.Name(id="tuple"), slice=ast.Tuple(elts=items)):
            return f"({', '.join(map(_words, items))})"
        case ast.Subscript(value=ast.Name(id="Sequence" | "Collection"), slice=item):
            return f"a list of {_words(item).replace('a mapping', 'mappings')}"
    return f"a {ast.unparse(node)}"


def _is_none(node: ast.expr) -> bool:
    return isinstance(node, ast.Constant) and node.value is None


def _literals(node: ast.Subscript) -> tuple[str, ...]:
    found = ast.literal_eval(node.slice)
    return found if isinstance(found, tuple) else (found,)
