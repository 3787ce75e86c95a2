"""Datagrams between hosts: what counts, what is dropped, and who has fallen silent."""

from __future__ import annotations

import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hvdtrain.cluster.liveness import watch
from hvdtrain.cluster.liveness.watch.messages import BEAT, BEAT_SIZE, BYE, END, Beats, Counts, PeerHost, opened, seal

SECRET = b"s" * 32
COUNTS = Counts(2, 1, 0, 0)


@pytest.fixture
def pair():
    """Hosts 0 and 1 of one job, on two sockets of this machine."""
    wires = [socket.socket(socket.AF_INET, socket.SOCK_DGRAM) for _ in range(2)]
    for wire in wires:
        wire.bind(("127.0.0.1", 0))
    where = [wire.getsockname() for wire in wires]
    yield [Beats(wires[i], SECRET, i, {1 - i: PeerHost(f"h{1 - i}", 1 - i, [where[1 - i]])}) for i in range(2)]
    for wire in wires:
        wire.close()


def test_a_beat_is_heard_and_counts_the_other_ranks(pair):
    a, b = pair
    assert not b.others().known
    a.send(COUNTS)
    b.receive()
    assert b.hosts[0].seen and b.hosts[0].counts == COUNTS
    assert (b.others().ranks, b.others().waiting, b.others().known) == (2, 1, True)


def test_a_host_is_silent_only_after_it_was_heard(pair):
    a, b = pair
    b.pass_time(100.0)
    assert b.silent(6.0) == []
    a.send(COUNTS)
    b.receive()
    b.pass_time(5.0)
    assert b.silent(6.0) == []
    b.pass_time(2.0)
    assert [host.name for host in b.silent(6.0)] == ["h0"]
    a.send(COUNTS)
    b.receive()
    assert b.silent(6.0) == []


@pytest.mark.parametrize("kind, ended", [(BYE, False), (END, True)])
def test_a_host_that_has_left_is_not_missed(pair, kind, ended):
    a, b = pair
    a.send(COUNTS)
    a.send(Counts(2, 0, 0, 2), kind)
    b.receive()
    b.pass_time(100.0)
    assert b.silent(6.0) == [] and b.ended is ended and b.leaving() and b.others().ranks == 0


def test_a_datagram_counts_once_and_only_with_the_seal_of_the_job(pair):
    a, b = pair
    kept = []
    a.wire = type("Tap", (), {"sendto": lambda self, data, flags, to: kept.append(data)})()
    a.send(COUNTS, BEAT)
    a.send(Counts(9, 9, 9, 9), BEAT)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as stranger:
        to = b.wire.getsockname()
        for data in (kept[1][:-1] + b"\0", kept[1] + b"x", b"", seal(b"other" * 6, kept[1][:-16])):
            stranger.sendto(data, to)
        b.receive()
        assert not b.hosts[0].seen
        for data in (kept[1], kept[0]):  # the older one comes later
            stranger.sendto(data, to)
    b.receive()
    assert b.hosts[0].counts.ranks == 9


@given(st.binary(max_size=BEAT_SIZE + 2))
def test_noise_is_never_opened(data):
    assert opened(SECRET, data) is None


def test_beats_are_due_by_the_bound(pair):
    a, _ = pair
    assert [a.due(t, 6.0) for t in (0.0, 0.5, 0.99, 1.0, 1.5, 2.1)] == [True, False, False, True, False, True]


def test_the_interfaces_that_mpi_was_told_to_use_come_first(monkeypatch):
    by_name = {"lo": "127.0.0.1", "eth0": "10.0.0.1", "docker0": "172.17.0.1", "ib0": "10.1.0.1", "off": ""}
    monkeypatch.setattr(socket, "if_nameindex", lambda: list(enumerate(by_name)))
    monkeypatch.setattr(socket, "gethostbyname", lambda node: "10.1.0.1")
    monkeypatch.setattr(watch, "_address", by_name.get)
    assert watch.addresses("a", {}) == ["10.1.0.1", "10.0.0.1", "172.17.0.1"]
    assert watch.addresses("a", {"OMPI_MCA_btl_tcp_if_include": "eth0"}) == ["10.0.0.1"]
    assert watch.addresses("a", {"OMPI_MCA_btl_tcp_if_include": "10.0.0.0/8"})[0] == "10.1.0.1"


def test_an_address_is_read_of_the_system():
    assert watch._address("lo") == "127.0.0.1" and watch._address("no-such") == ""
    assert struct.calcsize("<8s2IQ4I") + 16 == BEAT_SIZE
