"""Collectives in pieces give the right sums whatever order messages come through in: ranks in one process, made-up MPI.

Messages of one sender, receiver and tag are matched in the order in which they were posted, as MPI promises; they come
through in any order, as it does not.
"""

import random
from collections import defaultdict, deque

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hvdtrain.cluster.messages.progress import MpiProgress
from hvdtrain.comm.collectives import rounds
from hvdtrain.comm.collectives.base import begins
from hvdtrain.comm.collectives.mpi import DrivenExchange
from hvdtrain.comm.collectives.rounds import Call, Exchanged, Peers, Reduced, even_parts
from hvdtrain.core.protocols import AllReduce


class Wires:
    """Messages under way between ranks; ``draw`` decides what comes through next."""

    def __init__(self, draw):
        self.draw, self.sent, self.asked = draw, defaultdict(deque), defaultdict(deque)


class Request:
    """A message of one side; ``through`` once MPI would say so."""

    def __init__(self, wires, data):
        self.wires, self.data, self.through = wires, data, False

    @staticmethod
    def Testsome(requests):
        """Return indices of some requests that are through."""
        draw = requests[0].wires.draw
        found = [i for i, r in enumerate(requests) if r.through and draw.random() < 0.6]
        draw.shuffle(found)
        return found


class Comm:
    """A communicator as `Peers` uses it."""

    def __init__(self, wires, rank, size):
        self.wires, self.rank, self.size = wires, rank, size

    def Get_rank(self):
        return self.rank

    def Get_size(self):
        return self.size

    def Isend(self, data, dest, tag):
        return self._post(self.wires.sent, self.wires.asked, data, (self.rank, dest, tag), sends=True)

    def Irecv(self, data, source, tag):
        return self._post(self.wires.asked, self.wires.sent, data, (source, self.rank, tag), sends=False)

    def _post(self, mine, theirs, data, key, sends):
        request = Request(self.wires, data)
        if theirs[key]:
            other = theirs[key].popleft()
            source, target = (request, other) if sends else (other, request)
            assert source.data.nbytes == target.data.nbytes, f"{source.data.nbytes} bytes for {target.data.nbytes}"
            target.data[:] = source.data
            request.through = other.through = True
        else:
            mine[key].append(request)
        return request


def run(size, seed, make):
    """Run what ``make(peers)`` gives on every rank to its end, ranks and messages in a drawn order; operations by rank.
    """
    draw = random.Random(seed)
    wires = Wires(draw)
    peers = [Peers(Comm(wires, r, size), MpiProgress(threaded=False)) for r in range(size)]
    operations = [list(make(p)) for p in peers]
    for p, own in zip(peers, operations):
        for operation in own:
            p.progress.issue(operation)
    for _ in range(200_000):
        left = [r for r in range(size) if not all(o.over for o in operations[r])]
        if not left:
            break
        peers[draw.choice(left)].progress._move()
    assert all(o.over for own in operations for o in own), "operations that never end"
    assert not any(wires.sent.values()) and not any(wires.asked.values()), "messages that nobody has taken"
    return operations


@pytest.fixture(autouse=True)
def small(monkeypatch):
    """Pieces of a few elements, so that a short vector has many rounds."""
    monkeypatch.setattr(rounds, "PIECE", 32)
    monkeypatch.setattr(rounds, "LEAST_PIECE", 32)


def values(rank, n, k=0):
    return np.random.default_rng([rank, n, k]).integers(-9, 9, n).astype(np.float32)


SIZES = st.lists(st.integers(0, 150), min_size=2, max_size=4)


@settings(deadline=None, max_examples=150)
@given(sizes=SIZES, seed=st.integers(0, 2**32), spread=st.booleans(), depth=st.integers(1, 9), count=st.integers(1, 4))
def test_sums_of_any_parts(sizes, seed, spread, depth, count):
    P, n = len(sizes), sum(sizes)
    before, rounds.DEPTH = rounds.DEPTH, depth
    try:
        found = run(P, seed, lambda peers: [Reduced(peers, f"sum {k}", k, 0, values(peers.rank, n, k), sizes,
                                                    spread=spread) for k in range(count)])
    finally:
        rounds.DEPTH = before
    for r, operations in enumerate(found):
        for k, operation in enumerate(operations):
            want = np.sum([values(q, n, k) for q in range(P)], axis=0)
            own = slice(sum(sizes[:r]), sum(sizes[:r + 1]))
            np.testing.assert_array_equal(operation.value, want if spread else want[own])


@settings(deadline=None, max_examples=100)
@given(sizes=SIZES, seed=st.integers(0, 2**32))
def test_each_element_is_made_ready_before_it_is_read_and_told_once_it_is_the_sum(sizes, seed):
    P, n = len(sizes), sum(sizes)
    ready, arrived = defaultdict(lambda: np.zeros(n, int)), defaultdict(lambda: np.zeros(n, int))

    def make(peers):
        x_N = np.full(n, np.nan, np.float32)

        def fill(begin, end):
            ready[peers.rank][begin:end] += 1
            x_N[begin:end] = values(peers.rank, n)[begin:end]

        def told(begin, end):
            arrived[peers.rank][begin:end] += 1

        return [Reduced(peers, "sum", 0, 0, x_N, sizes, spread=True, divisor=P, ready=fill, arrived=told)]

    for r, (operation,) in enumerate(run(P, seed, make)):
        np.testing.assert_allclose(operation.value, np.mean([values(q, n) for q in range(P)], axis=0), rtol=1e-6)
        assert (ready[r] == 1).all() and (arrived[r] == 1).all()


@settings(deadline=None, max_examples=100)
@given(table=st.integers(2, 4).flatmap(lambda P: st.lists(st.lists(st.integers(0, 90), min_size=P, max_size=P),
                                                          min_size=P, max_size=P)), seed=st.integers(0, 2**32))
def test_rows_of_any_lengths_are_exchanged(table, seed):
    """``table[p][q]``: elements that rank p sends rank q."""
    P = len(table)

    def make(peers):
        sent = [np.full(n, 10.0 * peers.rank + q) for q, n in enumerate(table[peers.rank])]
        return [Exchanged(peers, "rows", 0, 0, sent, [np.zeros(row[peers.rank]) for row in table])]

    for r, (operation,) in enumerate(run(P, seed, make)):
        for q, raw in enumerate(operation.value):
            np.testing.assert_array_equal(raw.view(np.float64), np.full(table[q][r], 10.0 * q + r))


@settings(deadline=None, max_examples=60)
@given(P=st.integers(2, 4), seed=st.integers(0, 2**32), steps=st.lists(st.integers(1, 4), min_size=1, max_size=5))
def test_exchanges_of_several_requests_advance_in_any_order(P, seed, steps):
    def exchange(rank, k, n_steps):
        x = values(rank, 40, k)
        for _ in range(n_steps):
            x = (yield AllReduce(x.copy())) / P
        return x, {}

    def make(peers):
        for k, n_steps in enumerate(steps):
            yield DrivenExchange(exchange(peers.rank, k, n_steps), peers.progress, lambda request, stage, k=k: Reduced(
                peers, f"{k}.r{stage}", k, stage, request.flat_N, even_parts(40, P), spread=True), lambda x: x)

    for operations in run(P, seed, make):
        for k, operation in enumerate(operations):
            want = np.mean([values(q, 40, k) for q in range(P)], axis=0)
            np.testing.assert_allclose(operation.value[0], want, rtol=1e-5, atol=1e-6)


@settings(deadline=None, max_examples=30)
@given(P=st.integers(2, 4), seed=st.integers(0, 2**32), odd=st.integers(0, 3))
def test_ranks_that_entered_other_calls_all_hear_of_it_and_go_on(P, seed, odd):
    odd %= P
    found = run(P, seed, lambda peers: [Call(peers, "grad.1" if peers.rank == odd else "grad.0", 0),
                                        Call(peers, "the next", 1)])
    for first, second in found:
        assert isinstance(first.error, RuntimeError) and "rank 0 entered" in str(first.error)
        assert second.error is None


def test_long_words_that_differ_at_their_end_differ():
    words = "reducescatterv 'x' " + ", ".join(["1000"] * 90)
    assert not np.array_equal(rounds._said(words + "0"), rounds._said(words + "1"))
    assert rounds._words(rounds._said("short")) == "short"


def test_even_parts_are_all_of_it():
    for n in (0, 1, 63, 64, 1000, 4096):
        for size in (2, 3, 7):
            sizes = even_parts(n, size)
            assert sum(sizes) == n and len(sizes) == size and all(b % 64 == 0 for b in begins(sizes))
