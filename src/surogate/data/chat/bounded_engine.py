"""The template engine of transformers, with a bound on what a template may cost.

Templates come with models, from strangers. The engine's sandbox keeps them from files and processes, not from loops
without end and texts without bound. Here compiled templates count both (`Budget`). Nothing else differs: filters,
globals and options are those of transformers, and so is the function that renders.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterator
from types import BuiltinMethodType, FunctionType, MethodType
from typing import Any, Final

from jinja2 import Environment, Template, nodes
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer
from transformers.utils import chat_template_utils

from surogate_core.errors import PluginError

from . import growing
from .fixed_date import NAME, DayOfRendering
from .format_fields import price_format
from .priced_calls import COMPARING, FREE, price_arguments, price_method, priced_filter, priced_test
from .render_budget import ELEMENT, TURN, Budget, Overrun

_COMPILE: Final = "_compile_jinja_template"
_LONGEST_TEMPLATE: Final = 1 << 18
_LONGEST_DATE_FORMAT: Final = 256
_MOST_WORDS: Final = 10_000
# Names of filters that no template can write.
_ADD, _MULTIPLY, _POWER, _REMAINDER, _CONCATENATE = "+", "*", "**", "%", "~"
_CHECK, _KEEP, _TURNS = "(check)", "(keep)", "(turns)"
_TEXTS: Final = frozenset(("capitalize", "lower", "string", "title", "tojson", "trim", "upper", _CONCATENATE))
"""Filters that return text."""
_ADDED: Final = ("_loop_vars", "_block_vars")
_OF_DICT: Final = frozenset(dir(dict))
_OF_STR: Final = frozenset(name for name in dir(str) if not name.startswith(("_", "format")))
_OF_LOOP: Final = frozenset(("first", "index", "index0", "last", "length", "nextitem", "previtem"))
_SMALL: Final = (nodes.Const, nodes.Compare, nodes.Not, nodes.Test)
"""Expressions that are quickly compared with anything."""
_FEW_PARTS: Final = 8
"""Parts of unknown size that are added to a text before the sum is counted."""


def bounded_renderer(budget: Budget, day: DayOfRendering) -> Callable[..., Any]:
    """Return `render_jinja_template` of transformers, whose templates spend `budget`, which the caller starts.

    day: the date that they write.
    """
    theirs = inspect.unwrap(chat_template_utils.render_jinja_template)
    if _COMPILE not in theirs.__code__.co_names:
        raise PluginError(
            "the installed transformers renders chat templates in a way that cannot be bounded yet. Install the "
            "version that this release was tested with (see its installation page)."
        )
    environment = _BoundedEnvironment(theirs.__globals__[_COMPILE]("").environment, budget, day)
    compiled: Callable[[str], Template] = functools.lru_cache(environment.from_string)
    ours = FunctionType(
        theirs.__code__,
        {**theirs.__globals__, _COMPILE: compiled},
        theirs.__name__,
        theirs.__defaults__,
        theirs.__closure__,
    )
    ours.__kwdefaults__ = theirs.__kwdefaults__
    return ours


class _CountedTemplate(Template):
    def render(self, *args: Any, **kwargs: Any) -> str:
        """As the engine. The tools are known to be no larger than the row."""
        tools = kwargs.get("tools") or ()
        self.environment._budget.trees = {id(tools), *map(id, tools)}  # type: ignore[attr-defined]
        return super().render(*args, **kwargs)

    def generate(self, *args: Any, **kwargs: Any) -> Iterator[str]:
        """Yield the pieces of a rendering, which transformers joins itself where a template marks answers."""
        budget, size = self.environment._budget, 0  # type: ignore[attr-defined]
        for piece in super().generate(*args, **kwargs):
            size += len(piece)
            budget.spend(len(piece) + ELEMENT)
            budget.fits(size)
            yield piece


class _BoundedEnvironment(ImmutableSandboxedEnvironment):
    template_class = _CountedTemplate

    def __init__(self, theirs: Environment, budget: Budget, day: DayOfRendering) -> None:
        """Take the options, filters, tests, globals and tags of an environment."""
        options = set(inspect.signature(Environment.__init__).parameters) & set(vars(theirs))
        super().__init__(
            **{name: getattr(theirs, name) for name in options - {"extensions", "loader"}},
            extensions=[type(extension) for extension in theirs.extensions.values()],
        )
        self._budget, self._kept = budget, growing.keep(budget)
        self._turns = growing.turns(budget)
        self.concat = growing.write(budget)  # type: ignore[method-assign]
        self.globals.update(theirs.globals)
        self._hashing = self.globals.get("dict")
        now: Any = self.globals.get(NAME)
        if now is not None:
            self.globals[NAME] = day.writer(now)
        self._dated, self._written = self.globals.get(NAME), self.globals.get("lipsum")
        self.tests.update(theirs.tests)
        for name in COMPARING & self.tests.keys():
            test: Any = self.tests[name]
            self.tests[name] = priced_test(test, budget)
        self.filters.update(theirs.filters)
        for name in self.filters.keys() - FREE:
            self.filters[name] = priced_filter(name, self.filters[name], budget)
        self.filters |= {
            _ADD: growing.add(budget),
            _MULTIPLY: growing.multiply(budget),
            _POWER: growing.power(budget),
            _REMAINDER: growing.remainder(budget),
            _CONCATENATE: growing.concatenate(budget),
            _CHECK: growing.check(budget),
            _KEEP: self._kept,
            _TURNS: self._turns,
        }

    def from_string(self, source: Any, *args: Any, **kwargs: Any) -> Template:
        if len(source) > _LONGEST_TEMPLATE:  # time to compile
            raise Overrun(f"it has {len(source):,} characters; {_LONGEST_TEMPLATE:,} are allowed")
        return super().from_string(source, *args, **kwargs)

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        return super()._generate(_Counted(self).visit(source), *args, **kwargs)

    def getattr(self, obj: Any, attribute: str) -> Any:
        """As the sandbox, which asks every rule for every value; of these types few are left to ask."""
        kind = type(obj)
        if kind is dict:
            if attribute in obj and attribute not in _OF_DICT:
                return obj[attribute]
        elif (kind is str and attribute in _OF_STR) or (kind is LoopContext and attribute in _OF_LOOP):
            return getattr(obj, attribute)
        return super().getattr(obj, attribute)

    def call(self, context: Context, callee: Any, /, *args: Any, **kwargs: Any) -> Any:
        self._budget.spend(TURN)
        kind = type(callee)
        if kind is BuiltinMethodType:  # no rule of the sandbox is about these
            named = _named(kwargs) if kwargs else kwargs
            args = price_method(self._budget, callee, args, named)
            return self._kept(callee(*args, **named))
        if kind is MethodType and isinstance(callee.__self__, str):
            args = price_method(self._budget, callee, args, _named(kwargs))
        elif kind is MethodType or callee is self._hashing:
            price_arguments(self._budget, *args, **_named(kwargs))
        elif kind is LoopContext:
            args = tuple(map(self._turns, args))
        elif callee is self._dated:
            _refuse_long_date(*args, **_named(kwargs))
        elif callee is self._written:
            _refuse_many_words(*args, **_named(kwargs))
        return super().call(context, callee, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        formatting = super().wrap_str_format(value) if callable(value) else None
        if formatting is None:
            return None

        def run(*args: Any, **kwargs: Any) -> str:
            price_format(self._budget, value.__self__, args, kwargs)
            return str(self._kept(formatting(*args, **kwargs)))

        return run


def _named(kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments without those that compiled templates add."""
    return {name: value for name, value in kwargs.items() if name not in _ADDED}


def _refuse_long_date(*args: Any, **kwargs: Any) -> None:
    longest = max((len(text) for text in (*args, *kwargs.values()) if isinstance(text, str)), default=0)
    if longest > _LONGEST_DATE_FORMAT:
        raise Overrun(f"it has a format of a date of {longest:,} characters; {_LONGEST_DATE_FORMAT} are allowed")


def _refuse_many_words(n: Any = 5, html: Any = True, min: Any = 20, max: Any = 100) -> None:
    if n * max > _MOST_WORDS:
        raise Overrun(f"it makes {n * max:,} words of filler; {_MOST_WORDS:,} are allowed")


class _Counted(NodeTransformer):
    """Writes the operations of a template that may grow as filters, which compiled templates call the fastest."""

    def __init__(self, environment: Environment) -> None:
        self._environment = environment

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = self._filter(_TURNS, node.iter)
        return node

    def visit_Add(self, node: nodes.Add) -> nodes.Node:
        operands = _operands(node)
        if not any(map(_is_text, operands)):
            self.generic_visit(node)
            return self._filter(_ADD, node.left, node.right)
        # Text is added to text alone. Each part is bounded, so a few may be added before the sum is counted.
        text: nodes.Expr = self.visit(operands[0])
        unknown = 1
        for operand in operands[1:]:
            text = nodes.Add(text, self.visit(operand), lineno=node.lineno, environment=self._environment)
            unknown += not isinstance(operand, nodes.Const)
            if unknown > _FEW_PARTS:
                text = self._filter(_KEEP, text)
                unknown = 1
        return self._filter(_KEEP, text)

    def visit_Mul(self, node: nodes.Mul) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(_MULTIPLY, node.left, node.right)

    def visit_Pow(self, node: nodes.Pow) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(_POWER, node.left, node.right)

    def visit_Mod(self, node: nodes.Mod) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(_REMAINDER, node.left, node.right)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return self._filter(_CONCATENATE, nodes.List(node.nodes, lineno=node.lineno, environment=self._environment))

    def visit_Output(self, node: nodes.Output) -> nodes.Node:
        self.generic_visit(node)
        node.nodes = [child if _is_text(child) else self._filter(_CHECK, child) for child in node.nodes]
        return node

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        if not any(isinstance(one, _SMALL) for one in (node.expr, *(operand.expr for operand in node.ops))):
            node.expr = self._filter(_CHECK, node.expr)
            for operand in node.ops:
                operand.expr = self._filter(_CHECK, operand.expr)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            return self._filter(_KEEP, node)
        if not isinstance(node.arg, nodes.Const):
            node.arg = self._filter(_CHECK, node.arg)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        if not isinstance(node.key, nodes.Const):
            node.key = self._filter(_CHECK, node.key)
        return node

    def _filter(self, name: str, value: Any, *args: nodes.Expr) -> nodes.Filter:
        return nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno, environment=self._environment)


def _operands(node: nodes.Expr) -> list[nodes.Expr]:
    """Return what a chain of additions adds."""
    return [*_operands(node.left), node.right] if isinstance(node, nodes.Add) else [node]


def _is_text(node: nodes.Expr | None) -> bool:
    """Whether an expression is known to be text."""
    if isinstance(node, nodes.Filter):
        return node.name in _TEXTS or (node.name == _KEEP and _is_text(node.node))
    if isinstance(node, nodes.Add):
        return any(map(_is_text, _operands(node)))
    return isinstance(node, nodes.TemplateData | nodes.Concat) or (
        isinstance(node, nodes.Const) and isinstance(node.value, str)
    )
