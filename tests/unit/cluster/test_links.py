"""Links between hosts: which pairs are measured and when, which are slow, the messages over ranks that are threads."""

from __future__ import annotations

import queue
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations

import pytest

from hvdtrain.cluster import links
from hvdtrain.cluster.links import (
    LEAST_PIECE,
    MOST_PIECES,
    PAIR_S,
    PIECE,
    LinkTiming,
    PairLink,
    others_Bps,
    plan,
    rounds,
    sizing,
    slow,
    slowest_link,
)
from hvdtrain.core.errors import WaitTimeout


def link(a, b, mbit=1000.0, at_once=1):
    way = LinkTiming(250_000, 2e6 / (mbit * 1e6), 6)
    return PairLink((a, b), (2 * a, 2 * b), 25e-6, way, way, way, at_once)


# --- which pairs, and when -----------------------------------------------------------------------------------------

@pytest.mark.parametrize("hosts", [1, 2, 3, 4, 5, 8, 13])
def test_rounds_have_every_pair_once_and_no_host_twice_at_a_time(hosts):
    found = rounds(hosts)
    assert sorted(pair for group in found for pair in group) == list(combinations(range(hosts), 2))
    assert all(len({h for pair in group for h in pair}) == 2 * len(group) for group in found)
    assert len(found) == (0 if hosts == 1 else hosts - 1 + hosts % 2)


def test_few_pairs_are_measured_singly_many_at_once_and_too_many_in_part():
    assert plan(2) == ([[(0, 1)]], PAIR_S)
    groups, seconds = plan(6)
    assert [len(group) for group in groups] == [1] * 15 and seconds == PAIR_S
    groups, seconds = plan(7)
    assert [len(group) for group in groups] == [3] * 7 and seconds == PAIR_S
    groups, seconds = plan(40)
    assert len(groups) == 39 and seconds == pytest.approx(5 / 39)
    groups, seconds = plan(100)
    assert len(groups) == 50 and seconds == pytest.approx(0.1), "each host with 50 of the 99 others"
    groups, seconds = plan(3, 0.2)
    assert groups == rounds(3)[:2] and seconds == pytest.approx(0.1)


@pytest.mark.parametrize("rate, seconds, found", [
    (125e6, 0.015, (256 << 10, 7)), (12.5e9, 0.015, (PIECE, MOST_PIECES)), (1e3, 0.015, (LEAST_PIECE, 1)),
    (0.0, 1.0, (LEAST_PIECE, 1)), (12.5e6, 0.015, (16 << 10, 11))])
def test_pieces_are_so_large_that_several_fit_the_time(rate, seconds, found):
    assert sizing(rate, seconds) == found


# --- what is made of it --------------------------------------------------------------------------------------------

def test_a_pair_is_slow_that_has_less_than_half_of_the_others_median():
    found = [link(0, 1), link(0, 2, 450.0), link(0, 3, 2000.0), link(1, 2, 990.0), link(1, 3, 510.0), link(2, 3, 100.0)]
    assert slowest_link(found).hosts == (2, 3)
    assert others_Bps(found[5], found) == pytest.approx(990e6 / 8)
    assert [(one.hosts, middle) for one, middle in slow(found)] == [
        ((2, 3), pytest.approx(990e6 / 8)), ((0, 2), pytest.approx(990e6 / 8))]
    assert others_Bps(link(0, 1), [link(0, 1)]) is None and slow([link(0, 1, 1.0)]) == []


# --- the messages, over threads ------------------------------------------------------------------------------------

class Request:
    """A message of `Post`: ``test`` says whether it is through."""

    def __init__(self, test):
        self._test, self._over = test, False

    def Test(self):
        self._over = self._over or self._test()
        return self._over


class Post:
    """Two ranks that are threads: what of mpi4py's communicator a pair's messages need. ``loses``: drops pieces."""

    def __init__(self, rank, boxes, loses=False):
        self.rank, self._boxes, self._loses, self.longest, self.sent = rank, boxes, loses, 0, 0

    def Isend(self, x, dest, tag):
        self.longest, self.sent = max(self.longest, x.nbytes), self.sent + 1
        if not self._loses or tag != links._PIECE:
            self._boxes[dest, tag].put(x.copy())
        return Request(lambda: True)

    def Irecv(self, x, source, tag):
        def taken():
            try:
                x[...] = self._boxes[self.rank, tag].get_nowait()
            except queue.Empty:
                return False
            return True
        return Request(taken)


def ends(loses=False):
    boxes = {(rank, tag): queue.Queue() for rank in (0, 1) for tag in range(4)}
    return Post(0, boxes, loses), Post(1, boxes)


def test_one_end_leads_and_the_other_follows():
    first, second = ends()
    with ThreadPoolExecutor(1) as pool:
        other = pool.submit(links.follow, second, 0, 20.0)
        latency_s, *ways = links.lead(first, 1, 0.1, 20.0)
        other.result(20)
    assert 0 < latency_s < 1 and all(way.seconds > 0 and way.pieces > 0 for way in ways)
    assert max(first.longest, second.longest) <= PIECE
    assert all(LEAST_PIECE <= way.size <= PIECE for way in ways)
    assert not any(box.qsize() for box in first._boxes.values()), "a message was left over"


def test_a_wait_for_what_does_not_come_is_bounded():
    first, second = ends(loses=True)
    thread = threading.Thread(target=pytest.raises, args=(WaitTimeout, links.follow, second, 0, 0.2))
    thread.start()
    with pytest.raises(WaitTimeout, match=r"waited 0.2 s for rank 1 during a measurement of the link"):
        links.lead(first, 1, 0.05, 0.2)
    thread.join(20)


def test_one_host_has_no_links():
    assert links.measure(None, [[0, 1, 2]]) == []
