"""The built-in launcher: one process with a thread per device."""

from __future__ import annotations

from surogate_core.api import JoinContext, LauncherDef, World
from surogate_core.errors import ConfigError

_SIZES = ("WORLD_SIZE", "OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")
"""Variables by which torchrun, MPI and Slurm tell a process how many there are."""


def join_local(context: JoinContext, options: object = None) -> World:
    """Return the world of this process alone. Raises ConfigError if another program has started several."""
    for name in _SIZES:
        if context.environment.get(name, "1") not in ("", "0", "1"):
            raise ConfigError(
                f"launcher: local: {name} is {context.environment[name]}: this process is one of several, and each "
                "would train alone. To train as one run: pip install surogate-launch-env and launcher: auto. To train "
                f"alone nevertheless: env -u {name}."
            )
    count = context.wanted or context.device_count
    if count > context.device_count:
        visible = context.device_count if context.on_gpu else 0
        seen = f"{visible} {'is' if visible == 1 else 'are'} visible" if visible else "no GPU is visible"
        alone = "" if visible else ", and only one CPU can train"
        raise ConfigError(f"gpus: {count}: {seen} here{alone}. Use gpus: {max(visible, 1)}, or 0 for all visible GPUs.")
    devices = [device for device in range(count) for _ in range(context.ranks_per_device)]
    return World(size=len(devices), ranks=range(len(devices)), devices=devices)


LAUNCHERS = (LauncherDef(name="local", summary="One process with a thread per GPU", join=join_local),)
