"""The number of ranks of a run, which are spread evenly over machines."""

from __future__ import annotations

from ..api import DeviceInfo
from ..config.schema import TrainConfig
from ..errors import ConfigError


def count_ranks(config: TrainConfig, device: DeviceInfo, gpus: int | None, nodes: int, visible: int = 1) -> int:
    """Return the number of ranks on `gpus` devices of `nodes` machines.

    gpus     of all machines; None: as many on each as the key `gpus` asks for
    visible  devices of a machine, for `gpus: 0`

    Raises ConfigError if the devices cannot be spread evenly, or are CPUs.
    """
    count = gpus if gpus is not None else (config.gpus or visible) * nodes
    if count > 1 and device.sm is None:
        raise ConfigError(
            f"gpus: {count}: a CPU trains alone. Use gpus: 1, or name the GPU to plan for: --device h200."
        )
    if nodes < 1 or count < 1:
        raise ConfigError(f"{count} GPUs on {nodes} machines: use at least --gpus 1 and --nodes 1.")
    if count % nodes:
        fewer = max(n for n in range(1, nodes) if count % n == 0)
        raise ConfigError(
            f"{count} GPUs cannot be spread evenly over {nodes} machines. Use --gpus {nodes * -(-count // nodes)}, or "
            f"--nodes {fewer}."
        )
    ranks = count * config.ranks_per_gpu
    refuse_parts_of_one(config, ranks)
    return ranks


def refuse_parts_of_one(config: TrainConfig, ranks: int) -> None:
    """Raise ConfigError if a key asks for parts of what several ranks hold, and there is one."""
    keys = {"shard_gradients": config.shard_gradients, "shard_weights": config.shard_weights}
    asked = [f"{key}: true" for key, value in keys.items() if value]
    if config.zero_level > 1:
        asked.append(f"zero_level: {config.zero_level}")
    if ranks == 1 and asked:
        raise ConfigError(
            f"{asked[0]}: divides what several ranks hold, and this run has one. Set gpus, or remove the key."
        )
