"""Redirects results of a program into states, which outlive the program."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from ..op import Program
from ..value import Value


def write_to(program: Program, targets: Mapping[Value, Value]) -> Program:
    """Replace each key of `targets` by its state, in the ops that write it, the ops that read it and the outputs."""
    ops = tuple(op.on(targets) for op in program.ops)
    return replace(program, ops=ops, outputs=tuple(targets.get(v, v) for v in program.outputs))
