"""A proposal: changes of a run, and the plan with them."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ..machine.devices import GIB
from ..planning.plan import Plan, recomputed
from ..planning.run import Run
from .changes import Changes, yaml_lines


@dataclass(frozen=True)
class Proposal:
    """Changes of the config to make together, and the plan of `run`, which has them. A step keeps its tokens.

    The plan of a search is a sketch until it is `finished`: its seconds and missing bytes are estimates.

    resort  what the run gives up, if the changes are a last resort; "" if they keep what it learns
    """

    run: Run
    changes: Changes
    plan: Plan
    resort: str = ""

    @property
    def fits(self) -> bool:
        return self.plan.report.fits

    @property
    def lines(self) -> list[str]:
        """The changes as lines of YAML."""
        return yaml_lines(self.changes)

    @property
    def seconds(self) -> float:
        """Seconds of a step; infinite if it does not fit."""
        return self.plan.expected.seconds

    @property
    def missing(self) -> int:
        """Bytes of the device and the host that do not fit."""
        report, rungs = self.plan.report, self.plan.rungs
        freed = (rungs[0].kept - rungs[-1].kept) * self.plan.inputs.ranks_per_device if rungs else 0
        return max(0, report.missing_bytes - freed) + report.missing_host_bytes

    def finished(self) -> Proposal:
        """Return the proposal with the recomputation that its plan needs."""
        return replace(self, plan=recomputed(self.run, self.plan)) if self.plan.rungs else self

    def saves(self, before: Plan) -> int:
        """Return by how many bytes a device needs less than in the plan `before`."""
        return before.report.device_bytes["total"] - self.plan.report.device_bytes["total"]

    def costs(self, before: Plan) -> float:
        """Return the time that is added to a step, over the time of a step in the plan `before`."""
        after, step = self.plan.report, before.report.step.seconds
        return after.step.seconds * before.report.tokens / after.tokens / step - 1


def one_line(proposal: Proposal, before: Plan) -> str:
    """Return a proposal as part of a sentence: `a: true, b: 1 (saves 5.1 GiB)`."""
    saved, missing = proposal.saves(before), proposal.plan.report.missing_bytes
    effect = (
        f"saves {saved / GIB:.1f} GiB" if before.report.missing_bytes > 0 else f"{proposal.costs(before):+.0%} time"
    )
    rest = f", {missing / GIB:.1f} GiB still missing" if missing > 0 else ""
    return f"{', '.join(proposal.lines)} ({effect}{rest})"
