"""Reads a Python script that trains, without running it.

Read is every argument of every call of the libraries of trainers and of methods of what such calls return, and every
assignment to an attribute of it. Other code is the script's own.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from surogate_core.api import ConfigError

from .leaves import Leaf, leaves_of
from .rules import read_table
from .source import Rows, Source

_LIBRARIES = {"trl", "peft", "unsloth", "unsloth_zoo", "transformers", "datasets", "accelerate"}
_OBJECTS = {"args", "peft_config", "quantization_config", "model", "tokenizer", "processing_class", "data_collator"}
_OBJECTS |= {"trainer", "ref_model", "callbacks"}
"""Arguments that are objects of the script: what they hold is read where they are made."""
_PATIENCE = "early_stopping_patience"
_TOKENIZERS = ("Tokenizer", "Processor")
_RENAMED = {"pretrained_model_name_or_path": "model_name"}
_HARMLESS = {"print", "len", "str", "type", "isinstance", "iter", "next", "list", "range", "hasattr", "getattr", "id"}
_OPERATIONS: Mapping[type, Any] = {
    ast.Add: lambda a, b: a + b, ast.Sub: lambda a, b: a - b, ast.Mult: lambda a, b: a * b,
    ast.Div: lambda a, b: a / b, ast.FloorDiv: lambda a, b: a // b,
}  # fmt: skip


class _Unknown(Exception):
    """The value of an expression is known only to a running script."""


def read_script(path: Path, text: str) -> Source:
    """Return what the calls of a script set. Raises ConfigError."""
    try:
        tree = ast.parse(text, str(path))
    except (SyntaxError, ValueError, RecursionError) as error:
        line = f" (line {error.lineno})" if isinstance(error, SyntaxError) else ""
        raise ConfigError(f"{path}: is not Python: {getattr(error, 'msg', error)}{line}.") from None
    reader = _Reader(tree)
    reader.read()
    if len(reader.trainers) > 1:
        places = ", ".join(f"{name} in line {line}" for name, line in reader.trainers)
        raise ConfigError(f"{path}: trains {len(reader.trainers)} times: {places}. Convert a copy with one trainer.")
    if not reader.source.names:
        listed = ", ".join(read_table("calls")["arguments"])
        raise ConfigError(f"{path}: calls none of {listed}. Give the script that trains.")
    return reader.source


@dataclass
class _Reader:
    tree: ast.Module
    source: Source = field(default_factory=lambda: Source([]))
    trainers: list[tuple[str, int]] = field(default_factory=list)
    imported: dict[str, str] = field(default_factory=dict)
    made: dict[str, ast.expr] = field(default_factory=dict)
    constants: dict[str, ast.expr] = field(default_factory=dict)
    loads: list[ast.Call] = field(default_factory=list)
    references: set[str] = field(default_factory=set)
    known: set[str] = field(default_factory=set)
    bindings: dict[str, list[ast.expr]] = field(default_factory=dict)
    trained_in: int = 1 << 30
    positional: Mapping[str, list[str]] = field(default_factory=dict)

    def read(self) -> None:
        table = read_table("calls")
        arguments, self.positional = table["arguments"], table["positional"]
        self.known = {"load_dataset", *arguments} - {"train", "from_pretrained"}
        self._imports()
        self._names()
        calls = [node for node in ast.walk(self.tree) if isinstance(node, ast.Call)]
        calls.sort(key=lambda node: (node.lineno, node.col_offset))
        ours = [(node, name) for node in calls if (name := self._called(node))]
        self.trained_in = min((n.lineno for n, name in ours if self._trains(n, name)), default=self.trained_in)
        self.loads = [node for node, name in ours if name == "load_dataset"]
        given = [pair for node, name in ours for pair in _named(node, arguments.get(name, []))]
        self.references = {self._root(value) or "" for key, value in given if key == "ref_model"} - {""}
        for owner, (node, name) in enumerate(ours, 1):
            self._call(node, name, owner, arguments)
        self._assignments()
        if self.source.trained is None and len(self.loads) == 1:  # the rows of a script that reads no others
            self.source.trained = [Rows(0)]

    def _imports(self) -> None:
        for node in ast.walk(self.tree):
            if isinstance(node, ast.ImportFrom) and node.module and node.module.split(".")[0] in _LIBRARIES:
                self.source.words |= {node.module, node.module.split(".")[0], *(alias.name for alias in node.names)}
                self.imported |= {alias.asname or alias.name: alias.name for alias in node.names}
            elif isinstance(node, ast.Import):
                for alias in node.names:
                    if alias.name.split(".")[0] in _LIBRARIES:
                        self.source.words.add(alias.name.split(".")[0])
                        self.imported[alias.asname or alias.name.split(".")[0]] = alias.name

    def _names(self) -> None:
        """Find the names of literals, each assigned once, and of what the libraries return."""
        given = self.bindings
        for node in ast.walk(self.tree):
            for target, value in _bindings(node):
                given.setdefault(target, []).append(value)
        self.constants = {name: values[0] for name, values in given.items() if len(values) == 1}
        changed = True
        while changed:
            changed = False
            for name, values in given.items():
                found = [value for value in values if self._is_made(value)]
                if found and name not in self.made:
                    self.made[name] = found[0]
                    changed = True

    def _is_made(self, node: ast.AST) -> bool:
        """Return whether an expression is what a library returns, or a part of it."""
        if isinstance(node, ast.Name):
            return node.id in self.made
        if isinstance(node, ast.Attribute | ast.Subscript | ast.Starred | ast.Await):
            return self._is_made(node.value)
        if isinstance(node, ast.Call):
            return self._called(node) is not None
        if isinstance(node, ast.IfExp):
            return self._is_made(node.body) or self._is_made(node.orelse)
        return False

    def _called(self, node: ast.Call) -> str | None:
        """Return the name of a call of a library, or of a method of what one returned. None: of other code."""
        target = node.func
        if isinstance(target, ast.Name):
            if target.id in self.imported:
                return self.imported[target.id]
            if target.id in self.known or target.id.endswith("Trainer"):  # imported by `from trl import *`, say
                return target.id
            if target.id in self.made:
                return "tokenizer"
            passed = [arg for arg in node.args if isinstance(arg, ast.Name) and arg.id in self.made]
            return f"{target.id}()" if passed and target.id not in _HARMLESS else None
        if isinstance(target, ast.Attribute):
            root = self._root(target)
            if root in self.imported or self._is_made(target.value):
                return target.attr
        return None

    def _trains(self, node: ast.Call, name: str) -> bool:
        """Return whether a call is `.train()` of a trainer."""
        if name != "train" or not isinstance(node.func, ast.Attribute):
            return False
        of: ast.AST | None = node.func.value
        of = self.made.get(of.id) if isinstance(of, ast.Name) else of
        made = self._called(of) if isinstance(of, ast.Call) else None
        return bool(made) and (str(made).endswith("Trainer") or made == "train_on_responses_only")

    def _root(self, node: ast.AST) -> str | None:
        while isinstance(node, ast.Attribute | ast.Subscript | ast.Call):
            node = node.func if isinstance(node, ast.Call) else node.value
        return node.id if isinstance(node, ast.Name) else None

    # ------------------------------------------------------------------------------------------------ one call

    def _call(self, node: ast.Call, name: str, owner: int, arguments: Mapping[str, list[str]]) -> None:
        self.source.words.add(name)
        root = self.imported.get(self._root(node.func) or "", "")
        own = name in arguments  # its arguments are keys of the tool
        under: tuple[str, ...] = () if own else (name,)
        given = [*_named(node, arguments.get(name, self.positional.get(name, [])))]
        if name == "load_dataset":
            under, own = ("load_dataset", str(self.loads.index(node))), True
            given = [*_named(node, ["path", "name"])]
        elif node.lineno > self.trained_in and not name.startswith(("save_pretrained_", "push_to_hub")):
            under, own = ("after_training", name), False
        elif name == "from_pretrained" and root.endswith(_TOKENIZERS):
            names = [(_RENAMED.get(key, key), value) for key, value in given]
            first = [("tokenizer_name_or_path", value) for key, value in names if key == "model_name"]
            self._arguments(first, (), owner, "")
            under, own = ("from_pretrained", "tokenizer"), False
            given = [row for row in names if row[0] != "model_name"]
            if not given:
                return
        elif name == "from_pretrained" and root.startswith("Peft"):
            given = [*_named(node, ["model", "adapter_path"])]
        elif name == "from_pretrained" and self._is_reference(node):
            under = ("ref_model",)
        elif name == "from_pretrained" and root:
            self.source.leaves.append(Leaf(("model_class",), root, node.lineno, owner))
        elif name == "EarlyStoppingCallback" and all(key != _PATIENCE for key, _ in given):
            self.source.leaves.append(Leaf((_PATIENCE,), 1, node.lineno, owner))  # its default
        elif name == "train_on_responses_only":
            self.source.leaves.append(Leaf((name,), True, node.lineno, owner))
        if name.endswith("Trainer") and not name.startswith("Patch"):
            self.trainers.append((name, node.lineno))
            self.source.leaves.append(Leaf(("trainer",), name, node.lineno, owner))
            own, under = True, ()
        before = len(self.source.leaves)
        self._arguments(given, under, owner, "" if own else "calls")
        added = name == "add_callback" and bool(node.args) and all(map(self._is_made, node.args))
        if len(self.source.leaves) == before and not own and not added:
            text = ast.unparse(node)[:60]
            self.source.leaves.append(Leaf(under, text, node.lineno, owner, table="calls"))
        if (name == "select" and self._first(node) is not None) or (name == "train_test_split" and self._share(node)):
            for leaf in self.source.leaves[before:]:
                leaf.settle("converted")

    def _is_reference(self, node: ast.Call) -> bool:
        return any(self.made.get(name or "") is node for name in self.references)

    def _arguments(self, given: list[tuple[str, ast.expr]], under: tuple[str, ...], owner: int, table: str) -> None:
        """Add the leaves of arguments. Objects of the script are read where they are made."""
        for key, expression in given:
            if key in ("train_dataset", "eval_dataset") and not under:
                self._rows(key, expression, owner)
                continue
            if (key in _OBJECTS or table or under[:1] == ("ref_model",)) and (
                self._is_made(expression) or self._is_parts(expression)
            ):
                continue
            self._leaf((*under, _RENAMED.get(key, key)), expression, owner, table)

    def _leaf(self, place: tuple[str, ...], expression: ast.expr, owner: int, table: str) -> None:
        try:
            value = self._value(expression)
        except _Unknown:
            text = ast.unparse(expression)[:60]
            self.source.leaves.append(Leaf(place, text, expression.lineno, owner, code=True, table=table))
        else:
            self.source.leaves += leaves_of(value, place, expression.lineno, owner, table)

    def _is_parts(self, node: ast.expr) -> bool:
        return isinstance(node, ast.List | ast.Tuple) and bool(node.elts) and all(map(self._is_made, node.elts))

    def _value(self, node: ast.expr) -> Any:
        """Return the value of a literal, of names of literals, and of sums and products of numbers."""
        match node:
            case ast.Constant():
                return node.value
            case ast.Name() if node.id in self.constants and self.constants[node.id] is not node:
                expression = self.constants.pop(node.id)  # a name that refers to itself is not known
                try:
                    return self._value(expression)
                finally:
                    self.constants[node.id] = expression
            case ast.Attribute(value=ast.Name(id="torch")):
                return node.attr
            case ast.UnaryOp(op=ast.USub()):
                return -_number(self._value(node.operand))
            case ast.BinOp() if type(node.op) in _OPERATIONS:
                left, right = _number(self._value(node.left)), _number(self._value(node.right))
                try:
                    return _OPERATIONS[type(node.op)](left, right)
                except ZeroDivisionError:
                    raise _Unknown from None
            case ast.List() | ast.Tuple() | ast.Set():
                return [self._value(item) for item in node.elts]
            case ast.Dict() if all(isinstance(key, ast.Constant) for key in node.keys):
                return {key.value: self._value(value) for key, value in zip(node.keys, node.values, strict=True)}  # type: ignore[union-attr]
            case ast.Call(func=ast.Name(id="dict")) if not node.args and all(k.arg for k in node.keywords):
                return {keyword.arg: self._value(keyword.value) for keyword in node.keywords}
            case ast.JoinedStr():
                parts = (p.value if isinstance(p, ast.FormattedValue) and not p.format_spec else p for p in node.values)
                return "".join(str(self._value(part)) for part in parts)
        raise _Unknown

    # ------------------------------------------------------------------------------------------- rows and objects

    def _rows(self, key: str, expression: ast.expr, owner: int) -> None:
        """Note the rows that a trainer is given: of a call of load_dataset, a file, or code."""
        found = self._loaded(expression)
        if found is not None and key == "train_dataset":
            self.source.trained = [*(self.source.trained or []), found]
        elif found is not None:
            self.source.evaluated.append(found)
        else:
            try:
                value = self._value(expression)
            except _Unknown:
                leaf = Leaf((key,), ast.unparse(expression)[:60], expression.lineno, owner, code=True)
                self.source.leaves.append(leaf)
            else:
                self.source.leaves += leaves_of(value, (key,), expression.lineno, owner)

    def _loaded(self, node: ast.expr, seen: frozenset[str] = frozenset()) -> Rows | None:
        """Return the rows of an expression that begins with load_dataset."""
        if isinstance(node, ast.Name):
            values = [] if node.id in seen else self.bindings.get(node.id, [])
            found = [rows for value in values if (rows := self._loaded(value, seen | {node.id})) is not None]
            for value in values if found else ():
                self._taken(value, found[0], node.id)
            return found[0] if found else None
        if isinstance(node, ast.Call) and node in self.loads:
            return Rows(self.loads.index(node))
        inner = self._inner(node)
        rows = self._loaded(inner, seen) if inner is not None else None
        if rows is not None:
            self._operation(node, rows)
        return rows

    def _inner(self, node: ast.expr) -> ast.expr | None:
        """Return the rows that an expression changes or takes a part of."""
        if isinstance(node, ast.Subscript | ast.Starred):
            return node.value
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and self._is_made(node.func.value):
            return node.func.value
        return node.args[0] if isinstance(node, ast.Call) and node.args and self._called(node) else None

    def _taken(self, node: ast.expr, rows: Rows, name: str) -> None:
        """Apply `rows = rows.select(...)`: what is assigned to a name from the name itself."""
        chain: list[ast.expr] = []
        inner: ast.expr | None = node
        while inner is not None and not isinstance(inner, ast.Name):
            chain.append(inner)
            inner = self._inner(inner)
        if isinstance(inner, ast.Name) and inner.id == name:
            for step in reversed(chain):
                self._operation(step, rows)

    def _operation(self, node: ast.expr, rows: Rows) -> None:
        if isinstance(node, ast.Subscript) and isinstance(node.slice, ast.Constant):
            if isinstance(node.slice.value, str) and rows.share is None:
                rows.split = node.slice.value
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            if node.func.attr == "select":
                rows.samples = self._first(node) or rows.samples
            if node.func.attr == "train_test_split":
                rows.share = self._share(node)

    def _first(self, node: ast.Call) -> int | None:
        """Return N of `select(range(N))`."""
        match node.args:
            case [ast.Call(func=ast.Name(id="range"), args=[count])]:
                try:
                    value = self._value(count)
                except _Unknown:
                    return None
                return value if isinstance(value, int) else None
        return None

    def _share(self, node: ast.Call) -> float | None:
        sizes = [keyword.value for keyword in node.keywords if keyword.arg == "test_size"] or node.args[:1]
        try:
            value = self._value(sizes[0]) if sizes else None
        except _Unknown:
            return None
        return value if isinstance(value, float) and 0 < value < 1 else None

    def _assignments(self) -> None:
        """Note assignments to attributes of objects of the libraries, and to the environment."""
        for node in [node for node in ast.walk(self.tree) if isinstance(node, ast.Assign)]:
            for target in node.targets:
                if isinstance(target, ast.Attribute) and self._is_made(target.value):
                    place = self._attribute(target)
                    made = self.made.get(target.value.id) if isinstance(target.value, ast.Name) else None
                    name = self._called(made) if isinstance(made, ast.Call) else None
                    table = "" if str(name).endswith(("Config", "Arguments")) else "calls"
                    self._leaf(place, node.value, -1, table)
                elif isinstance(target, ast.Subscript) and ast.unparse(target.value) == "os.environ":
                    name = ast.unparse(target.slice).strip("'\"")
                    self.source.leaves.append(Leaf(("environment", name), "", node.lineno, table="launchers"))

    def _attribute(self, node: ast.expr) -> tuple[str, ...]:
        """Return the names of `model.config.use_cache` after the first."""
        names: list[str] = []
        while isinstance(node, ast.Attribute):
            names.insert(0, node.attr)
            node = node.value
        return tuple(names)


def _named(node: ast.Call, positional: list[str]) -> Iterator[tuple[str, ast.expr]]:
    """Yield the arguments of a call by name; a positional one without a name has its number."""
    for number, value in enumerate(node.args):
        yield (positional[number] if number < len(positional) else str(number)), value
    for keyword in node.keywords:
        if keyword.arg is None and isinstance(keyword.value, ast.Dict):
            for key, value in zip(keyword.value.keys, keyword.value.values, strict=True):
                yield (ast.unparse(key).strip("'\"") if key else "**"), value
        else:
            yield (keyword.arg or f"**{ast.unparse(keyword.value)}"[:40]), keyword.value


def _bindings(node: ast.AST) -> Iterator[tuple[str, ast.expr]]:
    """Yield the names that a statement binds, each with the expression that it is, or is a part of."""
    if isinstance(node, ast.Assign):
        pairs = [(target, node.value) for target in node.targets]
    elif isinstance(node, ast.AnnAssign) and node.value is not None:
        pairs = [(node.target, node.value)]
    elif isinstance(node, ast.For):
        pairs = [(node.target, node.iter)]
    elif isinstance(node, ast.AugAssign):
        pairs = [(node.target, node)] if isinstance(node.target, ast.Name) else []  # type: ignore[list-item]
    elif isinstance(node, ast.NamedExpr):
        pairs = [(node.target, node.value)]
    else:
        return
    for target, value in pairs:
        if isinstance(target, ast.Name):
            yield target.id, value if not isinstance(node, ast.For) else ast.Starred(value, ast.Load())
        elif isinstance(target, ast.Tuple | ast.List):
            exact = isinstance(value, ast.Tuple | ast.List) and len(value.elts) == len(target.elts)
            for number, item in enumerate(target.elts):
                if isinstance(item, ast.Name):
                    yield item.id, value.elts[number] if exact else ast.Starred(value, ast.Load())  # type: ignore[attr-defined]


def _number(value: Any) -> Any:
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e18:
        raise _Unknown
    return value
