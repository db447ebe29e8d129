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
    for node in (FIRST, SECOND):
        nodes.heard(node, 90.0)
    nodes.heard(FIRST_GONE, 100.0)
    nodes.heard(gone, 160.0)

    assert nodes.recently_left(200.0) == [(gone, 40.0), (FIRST_GONE, 100.0)]
    assert nodes.recently_left(701.0) == [(gone, 541.0)]
    assert nodes.left == [gone, FIRST_GONE]


def test_a_node_that_had_left_before_it_was_known_is_no_news(caplog: pytest.LogCaptureFixture) -> None:
    nodes = ClusterNodes()
    nodes.heard(FIRST_GONE, 100.0)

    assert nodes.alive == nodes.left == [] and not caplog.records


@pytest.mark.parametrize("anew", ["2026-11-28_07-52-00_2", "2026-11-28_06-52-00_2"], ids=["later", "summer time ends"])
def test_with_a_head_that_is_started_anew_all_nodes_of_the_last_one_have_left(anew: str) -> None:
    nodes = ClusterNodes()
    earlier = [msgspec.structs.replace(node, session="session_2026-11-28_07-36-49_1") for node in (FIRST, SECOND)]
    later = [msgspec.structs.replace(node, id=node.id[::-1] + "0", session=f"session_{anew}") for node in earlier]
    for node in earlier:
        nodes.heard(node, 100.0)

    # A worker that has not noticed tells of a node of the last one.
    for node in (later[0], msgspec.structs.replace(earlier[0], id="9" * 56), later[1]):
        nodes.heard(node, 160.0)

    assert nodes.alive == later
    assert {node.id for node in nodes.left} == {node.id for node in earlier}
