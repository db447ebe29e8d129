"""Nodes of a cluster that join and leave, as a worker reports them."""

from __future__ import annotations

import dataclasses
import threading

import msgspec

from pipeline.rollout.node_watch import NodeWatch
from pipeline.runtime.role import ClusterNode, Report

HEAD, FIRST, SECOND = (ClusterNode(f"{number}" * 56, f"gpu-{number}", f"10.0.0.{number}") for number in range(3))


def gone(node: ClusterNode) -> ClusterNode:
    return msgspec.structs.replace(node, alive=False)


@dataclasses.dataclass
class Cluster:
    nodes: list[ClusterNode]
    reports: list[Report] = dataclasses.field(default_factory=list)

    def watch(self) -> NodeWatch:
        return NodeWatch(lambda: self.nodes, self.reports.append)

    def told(self, watch: NodeWatch) -> list[ClusterNode | None]:
        self.reports.clear()
        watch.look()
        return [report.node for report in self.reports]


def test_each_node_that_joins_or_leaves_is_reported_once() -> None:
    cluster = Cluster([HEAD, FIRST])
    watch = cluster.watch()

    assert cluster.told(watch) == [HEAD, FIRST]
    assert cluster.told(watch) == []
    cluster.nodes = [HEAD, FIRST, SECOND]
    assert cluster.told(watch) == [SECOND]
    cluster.nodes = [HEAD, gone(FIRST), SECOND]
    assert cluster.told(watch) == [gone(FIRST)]
    assert cluster.told(watch) == []


def test_nodes_that_left_before_the_watch_are_reported_since_no_other_one_may_have_seen_them_leave() -> None:
    cluster = Cluster([HEAD, gone(FIRST)])

    assert cluster.told(cluster.watch()) == [HEAD, gone(FIRST)]


def test_a_cluster_that_does_not_answer_has_lost_no_node() -> None:
    cluster = Cluster([HEAD, FIRST])
    watch = cluster.watch()
    cluster.told(watch)

    cluster.nodes = []

    assert cluster.told(watch) == []


def test_its_thread_looks_at_once_and_ends_with_it() -> None:
    looked = threading.Event()
    watch = NodeWatch(lambda: [HEAD], lambda _report: looked.set())

    watch.start()

    assert looked.wait(30.0)
    watch.close()
    assert "node-watch" not in {thread.name for thread in threading.enumerate()}


def test_a_watch_that_was_not_started_can_be_closed() -> None:
    NodeWatch(list, lambda _report: None).close()


def test_a_report_of_a_node_arrives_as_it_was_sent() -> None:
    report = Report(node=gone(FIRST), placed_on=SECOND)

    assert msgspec.json.decode(msgspec.json.encode(report), type=Report) == report
