"""What offload strategies add to a run, without a plan of it: nothing is placed in memory, and no kernel is chosen."""

from __future__ import annotations

from dataclasses import dataclass

from ..assembly.assemble import Finished, Recording, finish
from ..assembly.inputs import PlanInputs
from ..memory.alignment import align
from ..memory.lifetimes import lifetimes, live_bytes
from ..program.op import Program, Stage
from ..program.value import Place
from .work import Work, step_work


@dataclass(frozen=True)
class Trial:
    """Memory and work of a run, near enough for differences between runs.

    device, host       bytes of the values that live as long as the run, of one device
    arena, host_arena  bytes of the activations that are live at the peak of a micro-step
    update             bytes of the device that are live at the peak of the update
    """

    device: int
    host: int
    arena: int
    host_arena: int
    update: int
    work: Work

    def minus(self, other: Trial) -> Trial:
        return Trial(
            self.device - other.device,
            self.host - other.host,
            self.arena - other.arena,
            self.host_arena - other.host_arena,
            self.update - other.update,
            self.work.plus(other.work, -1.0, -1.0),
        )


def try_run(recording: Recording, inputs: PlanInputs) -> Trial:
    """Return what the run of `inputs` takes, which is recorded in `recording`. Raises like `assemble`."""
    found = finish(recording, inputs)
    return Trial(
        device=_resident(found, "device"),
        host=_resident(found, "host"),
        arena=_peak(found, inputs, "micro", "device"),
        host_arena=_peak(found, inputs, "micro", "host"),
        update=_peak(found, inputs, "update", "device"),
        work=step_work(found.programs, inputs),
    )


def held_bytes(recording: Recording, inputs: PlanInputs) -> int:
    """Return the bytes of the params, gradients and states that the strategies of `inputs` keep on the host."""
    recorder = recording.recorder.forked(inputs)
    _, held = recorder.offloaded(recording.family, recording.params, recording.states)
    return sum(align(value.nbytes) for value in held)


def _resident(found: Finished, place: Place) -> int:
    return sum(align(v.nbytes) for v in found.resident if v.place == place)


def _peak(found: Finished, inputs: PlanInputs, stage: Stage, place: Place) -> int:
    def live(program: Program) -> int:
        if place == "host" and all(op.lane != "to_host" for op in program.ops):
            return 0
        lives = lifetimes(program, lambda op: inputs.ops[op.kind].workspace(op), place)
        return max(live_bytes(lives, len(program.ops)), default=0)

    return max((live(program) for program in found.programs if program.stage == stage), default=0)
