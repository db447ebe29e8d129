"""A peer of a restartable process: each life is met once, and messages of a dead one are void."""

from pipeline.runtime.messages import Welcome
from pipeline.runtime.peer import Peer


def test_each_life_is_met_once_and_none_but_the_first_renews_the_incarnation():
    peer = Peer()
    first = peer.incarnation

    assert peer.server is None
    assert peer.meets(Welcome(0)) and (peer.server, peer.has_met_another, peer.incarnation) == (0, False, first)
    assert not peer.meets(Welcome(0))
    assert peer.meets(Welcome(7)) and (peer.server, peer.has_met_another) == (7, True)
    second = peer.incarnation
    assert not peer.meets(Welcome(7)) and peer.has_met_another
    assert peer.meets(Welcome(0)), "a third life may have any number"

    assert len({first, second, peer.incarnation}) == 3


def test_incarnations_differ_between_peers_and_fit_63_bits():
    peers = [Peer() for _ in range(100)]
    before = [peer.incarnation for peer in peers]
    for peer in peers:
        peer.renew()

    found = {*before, *(peer.incarnation for peer in peers)}
    assert len(found) == 200
    assert all(0 <= incarnation < 1 << 63 for incarnation in found)
