"""Programs in tests: the ops to build them of, passes and their check, and the CPU to run them on."""

from __future__ import annotations

from ..memory.plan import plan_programs
from ..plugins.discovery import load_registry
from ..program.lanes import lane_order
from ..program.passes.dead_code import dead_code
from ..program.verify import verify
from ..runtime.arena import Buffers
from ..runtime.initialize import initialize
from ..runtime.reference import ReferenceExecutor
from ..standard_ops import OPS as STANDARD_OPS

__all__ = [
    "STANDARD_OPS",
    "Buffers",
    "ReferenceExecutor",
    "dead_code",
    "initialize",
    "lane_order",
    "load_registry",
    "plan_programs",
    "verify",
]
