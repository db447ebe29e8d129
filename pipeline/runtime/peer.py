"""One side of a conversation with a process that may be restarted at any time, which loses messages of both sides.

The other process, buffer or server, welcomes each peer with the number of its own life. At the welcome of a new life
the peer says who it is and what it holds, and repeats what the dead one may not have handled. It does so under a new
incarnation: the other side addresses its messages to an incarnation, so that those of the dead one are void.
"""

from __future__ import annotations

import random

from pipeline.runtime.messages import Welcome


class Peer:
    """The numbers of one conversation.

    Attributes:
        incarnation: This side's present one.
        server: The life of the other process that has welcomed this side last, None before the first welcome.
        has_met_another: Whether that life came after another one, so that messages may be lost.
    """

    def __init__(self) -> None:
        self.server: int | None = None
        self.has_met_another = False
        self.renew()

    def renew(self) -> None:
        """Make all messages void that are on their way to this side."""
        self.incarnation = random.getrandbits(62)

    def meets(self, welcome: Welcome) -> bool:
        """Return whether a welcome is a new life's; if it came after another one, this side is renewed."""
        if welcome.incarnation == self.server:
            return False
        self.has_met_another = self.server is not None
        if self.has_met_another:
            self.renew()
        self.server = welcome.incarnation
        return True
