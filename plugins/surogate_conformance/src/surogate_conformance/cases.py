"""The checks of a subject, in the order in which they run: ops after the runs that sample their inputs."""

from __future__ import annotations

from collections.abc import Iterator

from . import kinds  # noqa: F401  # registers the checks
from .bench import Bench
from .check import CHECKS, Case
from .subject import Subject

ORDER = (
    *("model", "recipe", "lowering", "optimizer", "loss", "adapter", "weight format", "checkpoint form", "offload"),
    *("op", "kernel", "export format", "format", "logger", "launcher"),
)


def cases(subject: Subject, bench: Bench) -> Iterator[Case]:
    """Yield every check of the package, then of its definitions. Kernels of one op are numbered."""
    for check in CHECKS:
        if "package" in check.kinds:
            yield Case(f"package {subject.name}", check, subject, bench)
    for kind in ORDER:
        seen: dict[str, int] = {}
        for item in subject.provided:
            if item.kind != kind:
                continue
            seen[item.name] = seen.get(item.name, 0) + 1
            number = f" ({seen[item.name]})" if seen[item.name] > 1 else ""
            for check in CHECKS:
                if kind in check.kinds:
                    yield Case(f"{kind} {item.name}{number}", check, item.definition, bench)
