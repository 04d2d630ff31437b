"""The ranks of a run, spread evenly over machines, and settings that keep the rows of a step on another number."""

from __future__ import annotations

from surogate_core.api import DeviceInfo
from surogate_core.errors import ConfigError

from ..config.schema import TrainConfig


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


def keep_rows(rows_per_step: int, ranks: int, batch_size: int) -> tuple[int, int] | None:
    """Return the micro-batch and accumulation with which `ranks` ranks take `rows_per_step` rows in an optimizer step.

    The micro-batch is the largest one that divides the rows of a rank and is at most `batch_size`. None: the rows
    cannot be divided evenly among the ranks.
    """
    if rows_per_step % ranks:
        return None
    rows = rows_per_step // ranks
    batch = max(size for size in range(1, min(batch_size, rows) + 1) if rows % size == 0)
    return batch, rows // batch


def kept_rows_text(rows_per_step: int, ranks: int, batch_size: int) -> str:
    """Return what to set so that an optimizer step keeps its rows on `ranks` ranks."""
    kept = keep_rows(rows_per_step, ranks, batch_size)
    if kept:
        batch, accumulation = kept
        return (
            f"set gradient_accumulation_steps: {accumulation} (and per_device_train_batch_size: {batch}) to keep the "
            f"{rows_per_step} rows of a step on {ranks} rank{'s' * (ranks > 1)}"
        )
    fewer = max(n for n in range(1, ranks) if rows_per_step % n == 0)
    more = next((n for n in range(ranks + 1, 8 * ranks) if rows_per_step % n == 0), None)
    return (
        f"the {rows_per_step} rows of a step cannot be divided evenly among {ranks} ranks, one on each GPU unless "
        f"ranks_per_gpu is set: use {fewer}" + (f" or {more}" if more else "")
    )
