"""Verifies what each pass returns and records which passes ran."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..api import Definition, OpDef
from ..errors import ProgramError
from ..origin import blaming
from ..program.op import Program
from ..program.value import Value
from ..program.verify import Checked, verify

_MOST_NAMES = 3


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

        `by` is the plugin's definition and function that made it; None for a pass of core. ProgramError names them. A
        plugin may not drop what outlives the program: gradients, params and states that it wrote before.
        """
        definition, function = by or (None, "")
        with blaming(definition.origin if definition else None, function):
            if before and after.stage != before.stage and by:
                raise ProgramError(f"returned {after.name}, of stage {after.stage}, in place of {before.name}")
            verify(after, self.ops, name, self.checked)
            if by and before and (lost := _lasting(before) - _lasting(after)):
                names = ", ".join(sorted(value.name for value in lost)[:_MOST_NAMES])
                raise ProgramError(f"{after.name}: no op writes {names} any more")
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


def _lasting(program: Program) -> set[Value]:
    """Return the gradients, params and states that a program writes."""
    return {value for op in program.ops for value in op.written if value.role in ("grad", "param", "state")}
