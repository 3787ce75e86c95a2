"""Which wire a job gets: the rule of auto, and the words for what cannot be had. No MPI: boot is made up."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from hvdtrain.cluster import wire
from hvdtrain.cluster.boot import HorovodUnavailable
from hvdtrain.cluster.topology import Host, Topology
from hvdtrain.collectives import mpi, shared
from hvdtrain.config import Config, Exchange
from hvdtrain.errors import UserError

ONE = Topology((Host("a", (0, 1), 2),))
TWO = Topology((Host("a", (0,), 2), Host("b", (1,), 2)))


@pytest.fixture
def job(monkeypatch):
    """A job of two ranks whose parts are names; ``lacking``: what cannot be had, and why."""
    lacking = {}

    def sharing(comm, timeout_s):
        if "shared" in lacking:
            raise shared.SharedUnavailable(lacking["shared"])
        return SimpleNamespace(name="shared")

    monkeypatch.setattr(wire.boot, "has_mpi", lambda: "mpi" not in lacking)
    monkeypatch.setattr(wire.boot, "mpi_comm", lambda: None)
    monkeypatch.setattr(wire.boot, "horovod_reason", lambda framework: lacking.get("horovod"))
    monkeypatch.setattr(shared, "SharedCollectives", sharing)
    monkeypatch.setattr(mpi, "MpiCollectives", lambda comm, timeout_s: SimpleNamespace(name="mpi"))

    def opened(kind="auto", topology=ONE, host_memory=True, size=2, nccl=False, broken="", **exchange):
        def horovod(name, control, options, start):
            if broken:
                raise HorovodUnavailable(broken)
            return SimpleNamespace(name="horovod", hierarchical=nccl)

        notes = []
        backend = SimpleNamespace(in_host_memory=lambda: host_memory, collectives=horovod)
        control = SimpleNamespace(rank=0, size=size, agree=bool, gather=lambda x: [x] * size)
        config = replace(Config(collectives=kind), exchange=Exchange(**exchange))
        return wire.open_wire(config, "torch", backend, control, topology, [], notes).name, notes

    return SimpleNamespace(open=opened, lacking=lacking)


def test_auto_shares_memory_on_one_host_only(job):
    assert job.open() == ("shared", [])
    assert job.open(topology=TWO) == ("horovod", [])
    assert job.open(host_memory=False) == ("horovod", [])
    assert job.open(size=1) == ("null", [])


def test_auto_without_shared_memory_takes_horovod_and_says_why(job):
    job.lacking["shared"] = "no shared memory can be made: full"
    assert job.open() == ("horovod", ["no shared memory for gradients: no shared memory can be made: full"])


def test_auto_under_gloo_takes_horovod(job):
    job.lacking["mpi"] = "gloo"
    assert job.open() == ("horovod", [])


def test_auto_without_horovod_takes_mpi_and_says_why(job):
    job.lacking["horovod"] = "Horovod is not installed"
    assert job.open(topology=TWO) == ("mpi", ["gradients go over plain MPI: Horovod is not installed"])
    del job.lacking["horovod"]
    assert job.open(topology=TWO, broken="stale") == ("mpi", ["gradients go over plain MPI: stale"])


def test_what_is_asked_for_is_had_or_refused(job):
    assert [job.open(kind)[0] for kind in ("horovod", "mpi", "shared")] == ["horovod", "mpi", "shared"]
    assert job.open("null")[1] == ["collectives null: gradients are not exchanged, every rank trains its own model"]
    job.lacking.update(shared="separate", horovod="not installed")
    with pytest.raises(UserError, match="collectives shared cannot be had: separate"):
        job.open("shared")
    with pytest.raises(UserError, match="collectives horovod cannot be had: not installed"):
        job.open("horovod")


def test_hierarchical_needs_a_wire_that_does_it(job):
    assert job.open(topology=TWO, hierarchical=True)[0] == "shared"
    assert job.open("horovod", topology=TWO, hierarchical=True, nccl=True)[0] == "horovod"
    with pytest.raises(UserError, match="hierarchical with a Horovod that was built without NCCL"):
        job.open("horovod", topology=TWO, hierarchical=True)
    for kind in ("mpi", "null"):
        with pytest.raises(UserError, match=f"hierarchical with collectives {kind}"):
            job.open(kind, topology=TWO, hierarchical=True)


@pytest.mark.parametrize("option", ["adasum", "autotune"])
def test_horovods_own_options_take_horovod(job, option):
    assert job.open(**{option: True})[0] == "horovod"
    for kind in ("mpi", "shared", "null"):
        with pytest.raises(UserError, match=f"exchange.{option} with collectives {kind}"):
            job.open(kind, **{option: True})
    job.lacking["horovod"] = "not installed"
    with pytest.raises(UserError, match="collectives horovod cannot be had: not installed"):
        job.open(**{option: True})
