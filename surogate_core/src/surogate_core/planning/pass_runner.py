"""Verifies what each pass returns and records which passes ran."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..api import Definition, OpDef
from ..origin import blaming
from ..program.op import Program
from ..program.value import Value
from ..program.verify import Checked, verify


@dataclass(frozen=True)
class Pass:
    """A pass that ran, for the listing of `surogate plan`."""

    name: str
    program: str
    ops_before: int
    ops_after: int


Blamed = tuple[Definition, str]
"""A definition of a plugin, and the function of it that made a program."""


@dataclass
class PassRunner:
    """Verifies the programs of a family between passes. `checked` is what it found valid so far."""

    ops: Mapping[str, OpDef]
    checked: Checked = field(default_factory=Checked)
    passes: list[Pass] = field(default_factory=list)

    def __call__(self, name: str, before: Program | None, after: Program, by: Blamed | None = None) -> Program:
        """Verify `after`, which the pass `name` made of `before`, and return it.

        `by` is the plugin's definition and function that made it; None for a pass of core. ProgramError names them.
        """
        definition, function = by or (None, "")
        with blaming(definition.origin if definition else None, function):
            verify(after, self.ops, name, self.checked)
        self.passes.append(Pass(name, after.name, len(before.ops) if before else 0, len(after.ops)))
        return after

    def forked(self) -> PassRunner:
        """Return a runner that has verified the same, for programs that share what this one has verified so far."""
        known = self.checked
        checked = Checked(set(known.ops), set(known.signatures), dict(known.values))
        return PassRunner(self.ops, checked, list(self.passes))

    def replace_values(self, values: Iterable[Value]) -> None:
        """From now on `values` have their names. Programs that use what had these names before are refused."""
        self.checked.values.update({value.name: value for value in values})
