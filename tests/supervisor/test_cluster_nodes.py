"""The nodes of a cluster, from the reports of several workers."""

from __future__ import annotations

import msgspec
import pytest

from pipeline.runtime.role import ClusterNode
from pipeline.supervisor.cluster_nodes import ClusterNodes

FIRST, SECOND = (ClusterNode(f"{number}" * 56, f"gpu-{number}", f"10.0.0.{number}") for number in (1, 2))
FIRST_GONE = msgspec.structs.replace(FIRST, alive=False)


def test_reports_of_several_workers_in_any_order_count_each_node_once(caplog: pytest.LogCaptureFixture) -> None:
    nodes = ClusterNodes()
    for worker, node in (("rollout-7", FIRST), ("rollout-3", FIRST), ("rollout-5", FIRST), ("rollout-5", SECOND)):
        nodes.placed(worker, node)

    with caplog.at_level("INFO"):
        for node in (FIRST, SECOND, FIRST, FIRST_GONE, FIRST, FIRST_GONE):
            nodes.heard(node, 100.0)

    assert nodes.alive == [SECOND] and nodes.left == [FIRST_GONE]
    assert [(record.levelname, record.getMessage()) for record in caplog.records] == [
        ("INFO", "node joined the cluster: node=gpu-1 address=10.0.0.1 nodes=1"),
        ("INFO", "node joined the cluster: node=gpu-2 address=10.0.0.2 nodes=2"),
        ("WARNING", "node left the cluster: node=gpu-1 address=10.0.0.1 nodes=1 workers=rollout-3,rollout-7"),
    ]


def test_a_node_that_left_is_recent_for_ten_minutes_the_last_one_first() -> None:
    nodes = ClusterNodes()
    gone = msgspec.structs.replace(SECOND, alive=False)
    nodes.heard(FIRST_GONE, 100.0)
    nodes.heard(gone, 160.0)

    assert nodes.recently_left(200.0) == [(gone, 40.0), (FIRST_GONE, 100.0)]
    assert nodes.recently_left(701.0) == [(gone, 541.0)]
    assert nodes.left == [gone, FIRST_GONE]
