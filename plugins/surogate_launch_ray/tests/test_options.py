"""The section `distributed`, and what is decided without a cluster."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
from end_to_end.product import make_workplace

from surogate import run
from surogate_core.api import ConfigError, NonFiniteError, PluginError

pytest.importorskip("surogate_launch_ray", reason="the plugin is not installed: pip install surogate-launch-ray")


@pytest.fixture
def load(tmp_path: Path) -> Any:
    return lambda **keys: run.load(make_workplace(tmp_path).write(**keys))


def test_the_section_selects_the_launcher_unless_another_is_named(load: Any) -> None:
    loaded = load(distributed={"num_nodes": 2, "gpus_per_node": "8", "worker_output_dir": None})
    assert loaded.config.launcher == "ray"
    assert loaded.options["launcher", "ray"].distributed.gpus_per_node == 8
    assert load().config.launcher == "local"
    other = load(distributed={}, launcher="local")
    assert other.config.launcher == "local"
    assert "distributed: has no effect, since launcher ray is not used by this run" in other.notices


def test_a_run_has_one_launcher(load: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("surogate_launch_env", reason="surogate-launch-env is not installed")
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(
        ConfigError, match=r"env \(by RANK, WORLD_SIZE\) and ray \(by distributed\) would start this run"
    ):
        load(distributed={"num_nodes": 2})


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"nodes": 2}, "distributed.nodes: unknown key; the keys here are gpus_per_node, num_nodes, placement_seconds"),
        ({"num_node": 2}, "distributed.num_node: unknown key; did you mean num_nodes?"),
        ({"num_nodes": 0}, "distributed.num_nodes: must be at least 1 (got 0)"),
        ({"num_nodes": True}, "distributed.num_nodes: must be a number (got true)"),
        ({"placement_seconds": "soon"}, "distributed.placement_seconds: must be a number"),
        (3, "distributed: must be a section of keys (got 3)"),
    ],
)
def test_errors_in_the_section_name_the_dotted_key(load: Any, section: Any, words: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(distributed=section)
    assert words in str(caught.value)
    with pytest.raises(ConfigError, match=r"distributed"):
        load(distributed=section, launcher="local")


def test_variables_for_the_processes_are_chosen_by_name() -> None:
    from surogate_launch_ray.driver import forwarded

    given = {"HF_TOKEN": "t", "NCCL_DEBUG": "WARN", "XDG_CACHE_HOME": "/c", "CUDA_VISIBLE_DEVICES": "3", "HOME": "/h"}
    assert forwarded(given) == {"HF_TOKEN": "t", "NCCL_DEBUG": "WARN", "XDG_CACHE_HOME": "/c"}


def test_a_job_that_would_be_killed_while_it_saves_is_told_how_to_get_the_time() -> None:
    from surogate_launch_ray.driver import short_stop

    job = {"RAY_JOB_CONFIG_JSON_ENV_VAR": "{}"}
    assert '{"env_vars": {"RAY_JOB_STOP_WAIT_TIME_S": "600"}}' in short_stop(job)
    assert short_stop({}) == short_stop(job | {"RAY_JOB_STOP_WAIT_TIME_S": "60"}) == ""


def test_a_node_that_differs_is_named_with_the_difference() -> None:
    from surogate_launch_ray.probes import Facts, differences

    here = Facts("laptop", "10.0.0.1", "3.12", {"surogate-core": "0.2", "surogate-lora": "0.1"}, True)
    same = Facts("a", "10.0.0.2", "3.12", {**here.packages, "another": "1"}, True)
    odd = Facts("b", "10.0.0.3", "3.11", {"surogate-core": "0.1"}, True)
    assert differences(here, [same]) == []
    assert differences(here, [same, odd]) == [
        "node 10.0.0.3 (b): Python is 3.11 there, 3.12 here; surogate-core is 0.1 there, 0.2 here; surogate-lora is "
        "not installed there, 0.1 here"
    ]


def test_an_error_crosses_processes_as_it_is_or_as_the_nearest_class() -> None:
    from surogate_launch_ray.node import portable

    plugin = PluginError("broken")
    for error in (ConfigError("no such file"), plugin, NonFiniteError("nan", weights_whole=True), KeyboardInterrupt()):
        again = pickle.loads(pickle.dumps(portable(error)))
        assert isinstance(error, type(again)) and str(again) == str(error)
        assert getattr(again, "exit_code", None) == getattr(error, "exit_code", None)
    told = ConfigError("said elsewhere")
    told.told = True
    assert getattr(portable(told), "told", None) is True
    try:
        raise ZeroDivisionError("division by zero")
    except ZeroDivisionError as error:
        again = pickle.loads(pickle.dumps(portable(error)))
    assert isinstance(again, ZeroDivisionError) and os.path.basename(__file__) in again.__notes__[0]


def test_the_interface_is_the_one_that_carries_the_address() -> None:
    from surogate_launch_ray.node import interface_of

    assert interface_of("127.0.0.1") == "lo" and interface_of("203.0.113.7") == ""


def test_an_address_at_which_nothing_listens_is_refused_at_once(
    load: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install surogate-launch-ray")
    monkeypatch.setenv("RAY_ADDRESS", "127.0.0.1:1")
    for address, shown in (
        ("auto", r"auto \(RAY_ADDRESS is 127.0.0.1:1\)"),
        ("ray://127.0.0.1:1", "ray://127.0.0.1:1"),
    ):
        with pytest.raises(
            ConfigError, match=rf"distributed.ray_address: {shown}: .* refused. Start one with `ray start"
        ):
            run.train(load(distributed={"ray_address": address}), lambda line: None)


def test_the_key_of_one_machine_is_refused() -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install surogate-launch-ray")
    from surogate_launch_ray.cluster import Wanted, wanted_nodes

    with pytest.raises(ConfigError, match=r"gpus: 8: .* use distributed.gpus_per_node: 8"):
        wanted_nodes(2, 0, 8)
    assert (
        str(wanted_nodes(2, 8, 8)) == "2 nodes with 1 CPU and 8 GPUs each" and str(Wanted(1, 0)) == "a node with 1 CPU"
    )


@pytest.mark.parametrize(
    ("gpus", "nodes", "found"),
    [([0, 8, 8], 2, 8), ([8, 4], 2, 4), ([0, 0], 2, 0), ([0, 8, 8], 3, "2 of the 3 nodes of the cluster have GPUs")],
)
def test_gpus_per_node_0_means_all_that_each_node_has(
    gpus: list[int], nodes: int, found: int | str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("ray", reason="Ray is not installed: pip install surogate-launch-ray")
    from surogate_launch_ray import cluster

    monkeypatch.setattr(cluster, "_alive", lambda: [{"Resources": {"GPU": float(count)}} for count in gpus])
    if isinstance(found, int):
        assert cluster.wanted_nodes(nodes, 0, 1).gpus == found
    else:
        with pytest.raises(ConfigError, match=found):
            cluster.wanted_nodes(nodes, 0, 1)
