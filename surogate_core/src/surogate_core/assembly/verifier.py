"""Verifies what each pass returns and records which passes ran."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field

from ..api import Definition, OpDef
from ..errors import ProgramError
from ..origin import Origin, blaming
from ..program.op import Program
from ..program.value import Value
from ..program.verify import Checked, verify

_MOST_NAMES = 3


Blamed = tuple[Definition, str]
"""A definition of a plugin, and the function of it that made a program."""


@dataclass(frozen=True)
class Step:
    """A place in the order of passes (`assemble.PASSES`).

    name  for `surogate plugins trace` and `surogate plan --diff`; some passes run more than once
    of    the programs that it makes or changes; "": none, it declares values
    does  what it does, in a few words
    """

    name: str
    of: str
    does: str


@dataclass(frozen=True)
class PassRun:
    """A program that a pass has made.

    step      the pass
    program   the name of the program
    by        the plugin's definition that made the program; None: core
    programs  what it was made of, if anything, and the program; None: not kept (`Verifier.keeps`)
    """

    step: Step
    program: str
    ops_before: int
    ops_after: int
    by: Origin | None = None
    programs: tuple[Program | None, Program] | None = None

    @property
    def name(self) -> str:
        """The name of the pass."""
        return self.step.name


@dataclass
class Verifier:
    """Verifies the programs of a run after their passes. `checked` is what it found valid so far.

    passes what passes have made so far, in their order
    later  checks of what passes returned, in their order, until `verify` runs them: most plans are made to compare
           their bytes, and a fifth of their time would be these checks. Each with the name of a program that a pass of
           core returned; "": it is run in any case
    keeps  whether `passes` have their programs, most of which nothing else needs
    """

    ops: Mapping[str, OpDef]
    passes: list[PassRun] = field(default_factory=list)
    keeps: bool = False
    checked: Checked = field(default_factory=Checked)
    later: list[tuple[str, Callable[[], None]]] = field(default_factory=list)

    def __call__(self, step: Step, before: Program | None, after: Program, by: Blamed | None = None) -> Program:
        """Verify `after`, which the pass `step` made of `before`, when `verify` is called, and return it.

        `by` is the plugin's definition and function that made it; None for a pass of core. ProgramError names them. A
        plugin may not drop what outlives the program: gradients, params and states that it wrote before.
        """
        name = step.name
        if by:
            definition, function = by
            with blaming(definition.origin, function):
                if before and after.stage != before.stage:
                    raise ProgramError(f"returned {after.name}, of stage {after.stage}, in place of {before.name}")
            self.later.append(("", lambda: self._verify_plugins(name, before, after, definition, function)))
        else:
            self.later.append((after.name, lambda: verify(after, self.ops, name, self.checked)))
        counts, kept = (len(before.ops) if before else 0, len(after.ops)), (before, after) if self.keeps else None
        self.passes.append(PassRun(step, after.name, *counts, by[0].origin if by else None, kept))
        return after

    def _verify_plugins(self, name: str, before: Program | None, after: Program, by: Definition, function: str) -> None:
        with blaming(by.origin, function):
            verify(after, self.ops, name, self.checked)
            if before and (lost := _lasting(before) - _lasting(after)):
                names = ", ".join(sorted(value.name for value in lost)[:_MOST_NAMES])
                raise ProgramError(f"{after.name}: no op writes {names} any more")

    def verify(self) -> None:
        """Run the checks that wait, of what core's passes made of a program only the last. Raises ProgramError: if one
        fails, all are run, so that the error names the first pass whose program is wrong.
        """
        checks, self.later = self.later, []
        last = {name: index for index, (name, _) in enumerate(checks)}
        try:
            for index, (name, check) in enumerate(checks):
                if not name or last[name] == index:
                    check()
        except Exception:
            self.checked, self.later = Checked(), checks
            for _, check in checks:
                check()
            raise

    @contextmanager
    def finding_causes(self) -> Iterator[None]:
        """Verify first if the block fails: the cause may be a program that an earlier pass has broken."""
        try:
            yield
        except Exception:
            self.verify()
            raise

    def forked(self) -> Verifier:
        """Return a verifier of programs that are made of the same ones. It verifies those first."""
        fork = Verifier(self.ops, list(self.passes), self.keeps)

        def follow() -> None:
            self.verify()
            known = self.checked
            fork.checked = Checked(set(known.ops), set(known.signatures), dict(known.values))

        fork.later.append(("", follow))
        return fork

    def replace_values(self, values: Iterable[Value]) -> None:
        """From now on `values` have their names. Programs that use what had these names before are refused."""
        named = {value.name: value for value in values}
        self.later.append(("", lambda: self.checked.values.update(named)))


def _lasting(program: Program) -> set[Value]:
    """Return the gradients, params and states that a program writes."""
    return {value for op in program.ops for value in op.written if value.role in ("grad", "param", "state")}
