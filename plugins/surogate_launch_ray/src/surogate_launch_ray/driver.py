"""Starts the processes of a run on the nodes of a cluster, shows what rank 0 says, and returns how the run ended."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from types import FrameType, TracebackType
from typing import Any, Final, Self

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import PlacementGroup

from surogate_core.api import ConfigError, RunStopped, Task

from .cluster import CPUS, connected, held, on, wanted_nodes
from .mailbox import Mailbox
from .options import Distributed
from .probes import Facts, ask, collect, differences

Notice = Callable[[str], None]

FORWARDED: Final = (
    *("HF_*", "HUGGING_FACE_HUB_TOKEN", "XDG_CACHE_HOME", "WANDB_*", "NCCL_*", "GLOO_*", "SUROGATE_*"),
    *(
        "CUDA_DEVICE_MAX_CONNECTIONS",
        "CUDA_LAUNCH_BLOCKING",
        "OMP_NUM_THREADS",
        "GOMP_SPINCOUNT",
        "TORCH_CPP_LOG_LEVEL",
    ),
)
"""Environment variables that the processes get from the driver. `*` stands for any end of a name."""

GRACE: Final = 15.0
"""Seconds that the other processes have to end by themselves after one has failed."""

ANSWER_SECONDS: Final = 5.0
"""Seconds to wait for the mailbox, which answers at once unless its machine is gone."""

_PERIOD = 0.2
"""Seconds between two looks at what the processes say."""


def start(task: Task, settings: Distributed, notice: Notice) -> Any:
    """Return what the process of rank 0 returns. See `LauncherDef.start`."""
    if line := short_stop(os.environ):
        notice(line)
    with connected(settings.ray_address):
        wanted = wanted_nodes(settings.num_nodes, settings.gpus_per_node, int(task.config.get("gpus", 1)))
        with held(wanted, settings.placement_seconds, notice) as group:
            nodes = checked_nodes(group, wanted.nodes)
            notice(f"Ray: {', '.join(map(str, nodes))}; {wanted.gpus or 'no'} GPU{'s' * (wanted.gpus != 1)} on each")
            sent = replace(task, environment={**task.environment, **forwarded(os.environ)})
            return Processes(group, nodes, wanted.gpus).run(sent, settings.worker_output_dir, notice)


def short_stop(environment: Mapping[str, str]) -> str:
    """Return a line if this run is a job of Ray that has no time to save once it is stopped, else ""."""
    if "RAY_JOB_CONFIG_JSON_ENV_VAR" not in environment or "RAY_JOB_STOP_WAIT_TIME_S" in environment:
        return ""
    return (
        "Ray kills this job 3 s after `ray job stop`, even if it still saves: submit it with "
        """--runtime-env-json '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "600"}}'"""
    )


def forwarded(environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of this process that the others get."""
    starts = tuple(name.removesuffix("*") for name in FORWARDED if name.endswith("*"))
    return {name: value for name, value in environment.items() if name in FORWARDED or name.startswith(starts)}


def checked_nodes(group: PlacementGroup, count: int) -> list[Facts]:
    """Return the facts of the nodes. Raises ConfigError if one differs from this machine in what a run needs."""
    folder = os.getcwd()
    nodes: list[Facts] = ask(collect, [on(group, node) for node in range(count)], folder)
    here = collect(folder)
    if wrong := differences(here, nodes):
        raise ConfigError(
            f"launcher: ray: nodes differ from this machine ({here.host}), which has read the config. "
            f"{'. '.join(wrong)}. Install the same versions everywhere."
        )
    if without := [str(node) for node in nodes if not node.has_folder]:
        raise ConfigError(
            f"launcher: ray: {', '.join(without)} has no folder {folder}, in which this run is started and relative "
            "paths begin. Start it in a folder that all nodes have, or in / with absolute paths."
        )
    return nodes


class Processes:
    """The processes of a run, one on each node."""

    def __init__(self, group: PlacementGroup, nodes: Sequence[Facts], gpus: int) -> None:
        self._group = group
        self._nodes = nodes
        self._gpus = gpus

    def run(self, task: Task, worker_output_dir: str | None, notice: Notice) -> Any:
        """Train a task in all processes. Return what that of rank 0 returns. Raises what a process raised."""
        from .node import Node, Part

        remote = ray.remote(num_cpus=CPUS, num_gpus=self._gpus)(Node)
        actors = [
            remote.options(scheduling_strategy=on(self._group, node)).remote() for node in range(len(self._nodes))
        ]
        mailbox = ray.remote(Mailbox).options(num_cpus=0, scheduling_strategy=on(self._group, 0)).remote()
        address = ray.get(actors[0].listen.remote())
        elsewhere = {"output_dir": worker_output_dir} if worker_output_dir is not None else {}
        running = {}
        for process, actor in enumerate(actors):
            part = Part(process, len(actors), self._gpus, address, os.getcwd())
            if process == 0:
                running[actor.train.remote(task, part, mailbox)] = process
            else:
                running[actor.train.remote(replace(task, config={**task.config, **elsewhere}), part, None)] = process
        try:
            with Signals() as signals:
                return self._result(running, mailbox, signals, notice)
        finally:
            for actor in (*actors, mailbox):
                with contextlib.suppress(RayError):
                    ray.kill(actor)

    def _result(self, running: dict[Any, int], mailbox: Any, signals: Signals, notice: Notice) -> Any:
        errors: dict[int, BaseException] = {}
        lost: dict[int, str] = {}
        deadline = float("inf")
        while running and time.monotonic() < deadline:
            ended, _ = ray.wait(list(running), timeout=_PERIOD)
            for number in signals.take():
                mailbox.signal.remote(number)
            _show(mailbox, notice)
            for ref in ended:
                process = running.pop(ref)
                try:
                    outcome = ray.get(ref)
                except RayError as error:
                    lost[process] = _reason(error)
                    continue
                if outcome.error is not None:
                    errors[process] = outcome.error
                elif process == 0:  # it has waited for the others
                    _show(mailbox, notice)
                    return outcome.value
            if errors or lost:
                deadline = min(deadline, time.monotonic() + GRACE)
        untold = [error for _, error in sorted(errors.items()) if not getattr(error, "told", False)]
        if lost and not any(isinstance(error, RunStopped) for error in untold):
            raise RunStopped(self._lost(lost))  # otherwise the living have said where it was, and why they stop
        raise (untold or list(errors.values()))[0]

    def _lost(self, lost: Mapping[int, str]) -> str:
        process, reason = min(lost.items())
        others = f" So are {len(lost) - 1} others." if len(lost) > 1 else ""
        return (
            f"process {process} of {len(self._nodes)}, on {self._nodes[process]}, is gone: {reason}.{others} "
            "The run has stopped. resume_from_checkpoint: true continues from the last complete checkpoint."
        )


class Signals:
    """Context manager that keeps signals for rank 0: the first that ends a run, and each SIGUSR1.

    A handler raises nothing, because it may run inside of Ray, which would report its exception as another.
    In a thread other than the main one, signals keep their handlers.
    """

    ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

    def __init__(self) -> None:
        self._kept: list[int] = []
        self._last = 0
        self._before: dict[signal.Signals, Any] = {}
        self._ending = 0  # signals that end a run

    def __enter__(self) -> Self:
        if threading.current_thread() is threading.main_thread():
            for number in (*self.ENDING, signal.SIGUSR1):
                if signal.getsignal(number) is not signal.SIG_IGN:
                    self._before[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    def take(self) -> list[int]:
        """Return the signals that came since the last call. Raises what the second one that ends a run means."""
        if self._ending > 1:
            raise KeyboardInterrupt if self._last == signal.SIGINT else SystemExit(128 + self._last)
        taken, self._kept = self._kept, []
        return taken

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number != signal.SIGUSR1:
            self._ending, self._last = self._ending + 1, number
            if self._ending > 1:
                return
            with contextlib.suppress(OSError):  # os.write, because a signal may arrive in the middle of a print
                name = signal.Signals(number).name
                os.write(2, f"\n{name}: sent to rank 0, to save after its step; a second signal ends all\n".encode())
        self._kept.append(number)


def _reason(error: RayError) -> str:
    """Return in a few words why Ray says that an actor is gone."""
    if isinstance(error, ActorUnavailableError):
        return "Ray cannot reach it"
    text = " ".join(str(error).split())
    found = re.search(r"exit detail: (.+?)\.? (?:Some common|$)", text)
    return (found[1] if found else text[:300]).rstrip(".")


def _show(mailbox: Any, notice: Notice) -> None:
    try:
        lines = ray.get(mailbox.take.remote(), timeout=ANSWER_SECONDS)
    except RayError:  # it is on the node of rank 0, whose end is reported by its process
        return
    for kind, text in lines:
        if kind == "notice":
            notice(text)
        else:
            stream = sys.stdout if kind == "out" else sys.stderr
            stream.write(text)
            stream.flush()
