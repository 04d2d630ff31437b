"""Questions to nodes before a run starts there: whether they can run it, and what is free.

Ray gets this module by value, because the package may be missing on a node. At its import it needs no other.
"""

from __future__ import annotations

import os
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

CORE = "surogate-core"


@dataclass(frozen=True)
class Facts:
    """host, address: of a node. packages: distribution -> version. has_folder: whether a folder exists there."""

    host: str
    address: str
    python: str
    packages: dict[str, str]
    has_folder: bool

    def __str__(self) -> str:
        return f"node {self.address} ({self.host})"


def ask(probe: Callable[..., Any], strategies: Sequence[Any], *args: Any) -> list[Any]:
    """Return what a function of this module returns where the scheduling strategies of Ray let it run."""
    import ray

    module = sys.modules[__name__]
    ray.cloudpickle.register_pickle_by_value(module)
    try:
        remote = ray.remote(num_cpus=0)(probe)
        calls = [remote.options(scheduling_strategy=strategy).remote(*args) for strategy in strategies]
        found: list[Any] = ray.get(calls)
        return found
    finally:
        ray.cloudpickle.unregister_pickle_by_value(module)


def free_resources() -> Mapping[str, Mapping[str, float]]:
    """Return {node: {resource: amount that is free}}. A Ray client cannot know it by itself."""
    from ray._private.state import available_resources_per_node

    found: Mapping[str, Mapping[str, float]] = available_resources_per_node()
    return found


def collect(folder: str) -> Facts:
    """Return the facts of this process. `folder` is that in which the run was started."""
    import ray

    found = [entry.dist for entry in metadata.entry_points(group="surogate")]
    packages = {distribution.name: distribution.version for distribution in found if distribution is not None}
    try:
        packages[CORE] = metadata.version(CORE)
    except metadata.PackageNotFoundError:
        packages.pop(CORE, None)
    python = f"{sys.version_info.major}.{sys.version_info.minor}"
    return Facts(socket.gethostname(), ray.util.get_node_ip_address(), python, packages, os.path.isdir(folder))


def differences(here: Facts, nodes: Sequence[Facts]) -> list[str]:
    """Return a phrase for each node that cannot run what this machine has checked: Python and packages that differ."""
    found = []
    for node in nodes:
        wrong = [f"Python is {node.python} there, {here.python} here"] if node.python != here.python else []
        for name, version in here.packages.items():
            if node.packages.get(name) != version:
                there = f"is {node.packages[name]} there" if name in node.packages else "is not installed there"
                wrong.append(f"{name} {there}, {version} here")
        if wrong:
            found.append(f"{node}: {'; '.join(wrong)}")
    return found
