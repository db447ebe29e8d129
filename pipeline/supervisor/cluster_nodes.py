"""The nodes of a run's Ray cluster, as workers report them (`pipeline.rollout.node_watch`)."""

from __future__ import annotations

import logging
from typing import Final

import msgspec

from pipeline.runtime.role import ClusterNode

_RECENT_S: Final = 600.0

log = logging.getLogger(__name__)


class ClusterNodes:
    """Nodes that belong to the cluster, and those that have left it since the start of the instance.

    Several workers report each node, in any order. A node that has left never comes back under its id. A head that is
    started anew has none of the nodes that were there before.
    """

    def __init__(self) -> None:
        self._nodes: dict[str, ClusterNode] = {}
        self._left_s: dict[str, float] = {}
        self._last_of: dict[str, str] = {}
        self._session = ""
        self._past_sessions: set[str] = set()

    def placed(self, worker: str, node: ClusterNode) -> None:
        """Keep the node on which a worker's newest actor was placed; a worker is named where its node leaves."""
        self._last_of[worker] = node.id

    def heard(self, node: ClusterNode, now_s: float) -> None:
        """Take a report of a node; log a node that has joined or left."""
        before = self._nodes.get(node.id)
        if before is None:
            # It has left before this instance knew of it, or it is of a head that there is no more.
            if not node.alive or node.session in self._past_sessions:
                return
            # The names of sessions begin with the head's local time, which goes back in autumn: they have no order.
            if node.session != self._session:
                for old in self.alive:
                    self._leave(old, now_s)
                self._past_sessions.add(self._session)
            self._session = node.session
            self._nodes[node.id] = node
            log.info("node joined the cluster: node=%s address=%s nodes=%d", node.name, node.address, len(self.alive))
        elif before.alive and not node.alive:
            self._leave(before, now_s)

    def _leave(self, node: ClusterNode, now_s: float) -> None:
        self._nodes[node.id] = msgspec.structs.replace(node, alive=False)
        self._left_s[node.id] = now_s
        workers = sorted(worker for worker, last in self._last_of.items() if last == node.id)
        log.warning(
            "node left the cluster: node=%s address=%s nodes=%d workers=%s",
            node.name, node.address, len(self.alive), ",".join(workers) or "none",
        )  # fmt: skip

    @property
    def alive(self) -> list[ClusterNode]:
        """The nodes that belong to the cluster, the one that joined first first."""
        return [node for node in self._nodes.values() if node.alive]

    @property
    def left(self) -> list[ClusterNode]:
        """The nodes that have left, the last one first."""
        return [self._nodes[one] for one in sorted(self._left_s, key=lambda one: -self._left_s[one])]

    def recently_left(self, now_s: float) -> list[tuple[ClusterNode, float]]:
        """Return the nodes that left in the last ten minutes, the last one first, each with the seconds since."""
        found = [(node, now_s - self._left_s[node.id]) for node in self.left]
        return [(node, ago_s) for node, ago_s in found if ago_s < _RECENT_S]
