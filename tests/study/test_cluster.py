"""A real Ray cluster of several nodes on this machine, one of which is killed in the middle of the study."""

import json
import os
import sys
import time

import psutil
import pytest
import small_lm
from small_study import FILE, bytes_of

from apportion.core.errors import ApportionError
from apportion.study import cells, watch
from apportion.study.cluster import run_ray
from apportion.study.files import claim, read
from apportion.study.runner import run

ray = pytest.importorskip("ray")


@pytest.fixture
def cluster(cache, monkeypatch):
    """A head without processors and two nodes with one each."""
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, sys.path)))
    made = Cluster(initialize_head=True, head_node_args={"num_cpus": 0, "include_dashboard": False})
    nodes = [made.add_node(num_cpus=1) for _ in range(2)]
    made.wait_for_nodes()
    yield made, nodes
    ray.shutdown()
    made.shutdown()


@pytest.mark.slow
def test_a_node_is_killed_and_nothing_is_lost_or_run_twice(cluster, tmp_path):
    made, nodes = cluster
    plan = read(FILE.replace("120_000", "2_000_000"))
    undisturbed, tmp_path = tmp_path / "undisturbed", tmp_path / "cluster"
    run(plan, undisturbed, workers=2, quiet=True)
    tmp_path.mkdir()
    claim(tmp_path, plan, None)
    begun, over = time.monotonic(), []
    for cell in run_ray(plan.cells(), tmp_path, made.address):
        over += [cell.folder] if cell is not None else []
        going = [p for p in (q.poll() for q in watch.progress(tmp_path)) if p.state == "running" and p.done]
        # In the middle of a run, and not near its end.
        if len(nodes) == 2 and (middle := next((p for p in going if p.done < 1_000_000), None)):
            home = psutil.Process(cells.state(middle.folder)["process"]).ppid()
            node = next(n for n in nodes if n.all_processes["raylet"][0].process.pid == home)
            nodes.remove(node)
            made.remove_node(node, allow_graceful=False)
        assert time.monotonic() - begun < 240
    assert len(nodes) == 1, "a node was killed"
    assert sorted(over) == sorted(c.folder for c in plan.cells()), "each cell ended once"
    assert bytes_of(tmp_path) == bytes_of(undisturbed)
    found = [json.loads(f.read_text()) for f in sorted(tmp_path.glob("cells/*/cell.json"))]
    assert {c["state"] for c in found} == {"done"}
    assert sum(c["sessions"] for c in found) == len(found) + 1, "the one that was cut off went on elsewhere"


@pytest.mark.slow
def test_language_models_run_on_it_too(cluster, tmp_path):
    pytest.importorskip("transformers")
    made, _ = cluster
    plan = small_lm.plan(small_lm.write_given(tmp_path), small_lm.arm("dr_grpo"), seeds=2)
    run(plan, tmp_path / "local", workers=2, quiet=True)
    run(plan, tmp_path / "cluster", ray=made.address, quiet=True)
    assert len(list(tmp_path.glob("cluster/cells/*/summary.json"))) == 2
    assert small_lm.bytes_of(tmp_path / "cluster") == small_lm.bytes_of(tmp_path / "local")


def test_no_cluster_is_said_in_one_line(tmp_path):
    with pytest.raises(ApportionError, match=r"no Ray cluster at 127\.0\.0\.1:1"):
        list(run_ray(read(FILE).cells(), tmp_path, "127.0.0.1:1"))
