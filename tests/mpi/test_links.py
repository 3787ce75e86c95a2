"""The links between hosts over MPI; each rank stands for a host."""

import time

import pytest

from hvdtrain.cluster import links
from hvdtrain.cluster.links import PIECE, plan

pytestmark = pytest.mark.mpi(min_size=2)


def test_every_pair_is_measured_and_every_rank_gets_all(comm, control, few_ranks):
    begin = time.monotonic()
    found = links.measure(comm, [[rank] for rank in range(comm.size)], 0.6, 30.0)
    seconds = time.monotonic() - begin
    assert control.gather(found) == [found] * comm.size
    assert sorted(link.hosts for link in found) == sorted(pair for group in plan(comm.size, 0.6)[0] for pair in group)
    for link in found:
        assert link.ranks == link.hosts and 0 < link.latency_s < 1 and link.at_once == 1
        assert all(0 < way.size <= PIECE and way.seconds > 0 and way.pieces > 0
                   for way in (link.there, link.back, link.both))
    assert seconds < 20, "its time is bounded"


def test_the_first_rank_of_a_host_speaks_for_it(comm, control, few_ranks):
    hosts = [list(range(comm.size - 1)), [comm.size - 1]]
    link, = links.measure(comm, hosts, 0.1, 30.0)
    assert link.hosts == (0, 1) and link.ranks == (0, comm.size - 1)
    assert links.measure(comm, [list(range(comm.size))]) == []
