"""Nodes of a Ray cluster that end, or that differ."""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path

import pytest
from end_to_end.product import assert_refused, make_workplace

pytest.importorskip("ray", reason="Ray is not installed: pip install surogate-launch-ray")
pytest.importorskip("surogate_launch_ray", reason="the plugin is not installed: pip install surogate-launch-ray")

from ray_clusters import NODE, Driver, actors, cluster, wait_until

pytestmark = pytest.mark.slow


def test_a_node_that_is_gone_ends_the_run_with_one_message(tmp_path: Path) -> None:
    place = make_workplace(tmp_path, max_steps=20000, eval_steps=0, save_steps=5, distributed={"num_nodes": 2})
    with cluster() as made:
        driver = Driver(place, made.address)
        driver.wait_for("saved step_")
        made.remove_node(made.list_all_nodes()[-1], allow_graceful=False)
        assert driver.end() == 3, driver.output
        assert driver.output.count("error: ") == 1, driver.output
        assert "gone" in driver.output and "checkpoint" in driver.output.split("error: ")[1]
        wait_until(lambda: not actors(made.address))


def test_a_node_with_another_version_is_refused_by_name(tmp_path: Path) -> None:
    odd = tmp_path / "packages/surogate_lora-9.9.dist-info"
    odd.mkdir(parents=True)
    (odd / "METADATA").write_text("Metadata-Version: 2.1\nName: surogate-lora\nVersion: 9.9\n")
    (odd / "entry_points.txt").write_text("[surogate]\nlora = surogate_lora.plugin\n")
    place = make_workplace(tmp_path, distributed={"num_nodes": 2})
    with cluster(nodes=1) as made:
        made.add_node(**NODE, env_vars={"PYTHONPATH": str(odd.parent)})
        done = place.surogate("train", place.write(), RAY_ADDRESS=made.address)
    assert_refused(
        done, "nodes differ from this machine", f"surogate-lora is 9.9 there, {version('surogate-lora')} here", "node "
    )
    assert not place.out.exists()
