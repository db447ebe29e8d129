"""The nodes of a Ray cluster: each one that joins or leaves is reported to the supervisor."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Final

from pipeline.runtime.role import ClusterNode, Report

WATCHERS: Final = 4
"""Workers that watch the nodes, the first ones; one would do, and could be dead."""
_EVERY_S: Final = 5.0


class NodeWatch:
    """Looks at the nodes every few seconds, in a thread of its own.

    Args:
        nodes: Returns the nodes, those that have left too; empty if the cluster does not answer.
        report: Sends a report to the supervisor.
    """

    def __init__(self, nodes: Callable[[], Sequence[ClusterNode]], report: Callable[[Report], None]) -> None:
        self._nodes = nodes
        self._report = report
        self._known: dict[str, ClusterNode] = {}
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="node-watch", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def close(self) -> None:
        """End the thread; a look under way is waited for."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(_EVERY_S)

    def look(self) -> None:
        """Report each node that has joined or left since the last look; all that the cluster knows at the first look.

        A node that had left before may have done so between two watches.
        """
        for node in self._nodes():
            if node != self._known.get(node.id):
                self._known[node.id] = node
                self._report(Report(node=node))

    def _run(self) -> None:
        while not self._ended.is_set():
            self.look()
            self._ended.wait(_EVERY_S)
