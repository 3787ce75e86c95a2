"""Transport of a job: the rule of auto, and messages for what cannot be had. No MPI: boot is made up."""

from dataclasses import replace
from types import SimpleNamespace

import pytest

from hvdtrain.cluster.devices import DeviceFacts
from hvdtrain.cluster.horovod import HorovodUnavailable
from hvdtrain.cluster.topology import HostRanks, Topology
from hvdtrain.comm import wires as wire
from hvdtrain.comm.collectives import mpi, shared
from hvdtrain.config import Config, ExchangeConfig
from hvdtrain.core.errors import UserError

ONE = Topology((HostRanks("a", (0, 1), 2),))
TWO = Topology((HostRanks("a", (0,), 2), HostRanks("b", (1,), 2)))
UNLIKE_SLOTS = Topology((HostRanks("a", (0, 1, 2), 8), HostRanks("b", (3,), 4)))
CPU = DeviceFacts("cpu", "a processor", "x86_64")
A100 = DeviceFacts("cuda", "A100", "sm_80")
RTX = DeviceFacts("cuda", "RTX 3090", "sm_86")


@pytest.fixture
def job(monkeypatch):
    """Return a job of two ranks whose parts are names; ``lacking``: what cannot be had, and why."""
    lacking = {}

    def sharing(comm, timeout_s):
        if "shared" in lacking:
            raise shared.SharedUnavailable(lacking["shared"])
        return SimpleNamespace(name="shared", host=True, overlaps=True, drives=True)

    monkeypatch.setattr(wire.boot, "has_mpi", lambda: "mpi" not in lacking)
    monkeypatch.setattr(wire.boot, "mpi_comm", lambda: None)
    monkeypatch.setattr(wire.horovod, "horovod_reason", lambda framework: lacking.get("horovod"))
    monkeypatch.setattr(wire, "_does_not_load", lambda framework: None)
    monkeypatch.setattr(shared, "SharedCollectives", sharing)
    monkeypatch.setattr(mpi, "MpiCollectives", lambda comm, timeout_s: SimpleNamespace(
        name="mpi", host=True, drives=True, overlaps=True))
    monkeypatch.setattr(wire.boot, "mpi_threads", lambda: "threads" not in lacking)
    monkeypatch.setattr(wire.horovod, "start_horovod", lambda framework, options, where, over_host: over_host)

    def opened(kind="auto", topology=ONE, host_memory=True, size=2, nccl=False, broken="", devices=(CPU, CPU),
               device="auto", **exchange):
        def horovod(name, control, options, start, over_host):
            if broken:
                raise HorovodUnavailable(broken)
            assert start("torch", options) is over_host
            return SimpleNamespace(name="horovod over host memory" if over_host else "horovod", host=False,
                                   hierarchical=nccl and not over_host)

        def stage(inner, control):
            return SimpleNamespace(name=f"{inner.name} over host memory")

        notes = []
        backend = SimpleNamespace(in_host_memory=lambda: host_memory, collectives=horovod, stage=stage)
        control = SimpleNamespace(rank=0, size=size, node="a", agree=bool, gather=lambda x: [x] * size)
        config = replace(Config(collectives=kind, exchange_device=device), exchange=ExchangeConfig(**exchange))
        return wire.open_wire(config, "torch", backend, control, topology, devices, notes).name, notes

    return SimpleNamespace(open=opened, lacking=lacking)


def test_auto_shares_memory_where_a_host_has_several_ranks(job):
    assert job.open() == ("shared", [])
    assert job.open(topology=UNLIKE_SLOTS, size=4) == ("shared", [])
    assert job.open(topology=TWO) == ("mpi", []), "no Horovod is started before it is measured"
    assert job.open(host_memory=False) == ("horovod", [])
    assert job.open(size=1) == ("null", [])


def test_auto_without_shared_memory_takes_mpi_and_says_why(job):
    job.lacking["shared"] = "no shared memory can be created: full"
    assert job.open() == ("mpi", ["no shared memory for gradients: no shared memory can be created: full"])


def test_auto_under_gloo_takes_horovod(job):
    job.lacking["mpi"] = "gloo"
    assert job.open() == ("horovod", [])


def test_gpus_without_horovod_take_mpi_and_say_why(job):
    job.lacking["horovod"] = "Horovod is not installed"
    gpus = {"topology": TWO, "host_memory": False}
    assert job.open(**gpus) == ("mpi", ["gradients go over plain MPI: Horovod is not installed"])
    del job.lacking["horovod"]
    assert job.open(**gpus, broken="stale") == ("mpi", ["gradients go over plain MPI: stale"])


def test_what_is_asked_for_is_had_or_refused(job):
    assert [job.open(kind)[0] for kind in ("horovod", "mpi", "shared")] == ["horovod", "mpi", "shared"]
    assert job.open("null")[1] == ["collectives null: gradients are not exchanged, every rank trains its own model"]
    job.lacking.update(shared="separate", horovod="not installed")
    with pytest.raises(UserError, match="collectives shared is not available: separate"):
        job.open("shared")
    with pytest.raises(UserError, match="collectives horovod is not available: not installed"):
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
    with pytest.raises(UserError, match="collectives horovod is not available: not installed"):
        job.open(**{option: True})


SAID = ["gradients go over host memory: different devices: cuda sm_80 (rank 0), cuda sm_86 (rank 1) "
        "(exchange_device: device forbids it)"]


@pytest.mark.parametrize("device, devices, want, notes", [
    ("auto", (CPU, CPU), "horovod", []),
    ("cpu", (CPU, CPU), "horovod", []),
    ("auto", (A100, A100), "horovod", []),
    ("cpu", (A100, A100), "horovod over host memory", []),
    ("auto", (A100, RTX), "horovod over host memory", SAID),
    ("device", (A100, RTX), "horovod", []),
    ("auto", (CPU, A100), "horovod over host memory",
     ["gradients go over host memory: different devices: cpu (rank 0), cuda sm_80 (rank 1) "
      "(exchange_device: device forbids it)"]),
], ids=range(7))
def test_unlike_devices_exchange_over_host_memory(job, device, devices, want, notes):
    assert job.open(topology=TWO, host_memory=False, devices=devices, device=device) == (want, notes)


def test_a_cpu_beside_a_gpu_on_one_host_does_not_share_memory_unless_asked(job):
    assert job.open(host_memory=False, devices=(CPU, A100))[0] == "horovod over host memory"
    assert job.open("shared", host_memory=False, devices=(CPU, A100))[0] == "shared over host memory"


def test_a_wire_of_host_memory_is_staged_where_there_is_a_gpu(job):
    job.lacking["horovod"] = "not installed"
    for devices in ((A100, A100), (CPU, A100)):
        assert job.open(host_memory=False, devices=devices)[0] == "mpi over host memory"
    assert job.open("mpi", devices=(CPU, CPU))[0] == "mpi"
    job.lacking["threads"] = "an MPI without THREAD_MULTIPLE"
    assert job.open("mpi", host_memory=False, devices=(A100, A100))[0] == "mpi"


def test_a_horovod_without_operations_of_the_cpu_gives_way_to_mpi_in_words(job):
    built = {"broken": "Horovod was built for GPUs only", "host_memory": False, "devices": (A100, RTX)}
    name, notes = job.open(**built)
    assert name == "mpi over host memory"
    assert notes == [*SAID, "gradients go over plain MPI: Horovod was built for GPUs only"]
    with pytest.raises(UserError, match="collectives horovod is not available: Horovod was built for GPUs only"):
        job.open("horovod", **built)


def test_horovod_lacks_on_one_rank_what_it_has_on_another(job, monkeypatch):
    """A rank that failed by itself must not take another transport than the rest."""
    backend = SimpleNamespace(in_host_memory=lambda: False,
                              collectives=lambda *a, over_host: SimpleNamespace(name="horovod", host=False))
    monkeypatch.setattr(wire.horovod, "load_horovod", lambda framework: None)
    answers = iter([[None, None], [None, None], [None, "stale on b"]])
    control = SimpleNamespace(rank=0, size=2, agree=bool, gather=lambda x: next(answers))
    notes = []
    got = wire.open_wire(Config(), "torch", backend, control, TWO, (CPU, CPU), notes)
    assert (got.name, notes) == ("mpi", ["gradients go over plain MPI: stale on b"])


def test_what_horovod_would_hang_on_or_leave_undone_is_refused(job):
    with pytest.raises(UserError, match="exchange_device: device with ranks on cpu and cuda"):
        job.open(host_memory=False, devices=(CPU, A100), device="device")
    with pytest.raises(UserError, match="hierarchical with gradients over host memory"):
        job.open("horovod", topology=TWO, hierarchical=True, nccl=True, devices=(A100, RTX))
    with pytest.raises(UserError, match="different numbers of ranks per host: 2 hosts: a \\(ranks 0-2"):
        job.open("horovod", topology=UNLIKE_SLOTS, size=4, hierarchical=True, nccl=True, devices=[A100] * 4)
    assert job.open("horovod", topology=UNLIKE_SLOTS, size=4, devices=[A100] * 4)[0] == "horovod"


def test_horovod_for_gpus_only_is_found_out(monkeypatch):
    hvd = SimpleNamespace(is_initialized=lambda: True, mpi_enabled=lambda: False, gloo_enabled=lambda: False)
    monkeypatch.setitem(wire.horovod._running, "torch", hvd)
    assert wire.horovod.start_horovod("torch", ExchangeConfig(), None) is hvd
    with pytest.raises(HorovodUnavailable, match="for GPUs only"):
        wire.horovod.start_horovod("torch", ExchangeConfig(), None, over_host=True)
    hvd.gloo_enabled = lambda: True
    assert wire.horovod.start_horovod("torch", ExchangeConfig(), None, over_host=True) is hvd


def test_a_rank_whose_horovod_does_not_load_keeps_the_others_from_starting_theirs(job, monkeypatch):
    monkeypatch.setattr(wire, "_does_not_load", lambda framework: "stale on b")
    monkeypatch.setattr(wire.horovod, "start_horovod", lambda *a, **k: pytest.fail("a rank would wait in hvd.init"))
    assert job.open(topology=TWO, host_memory=False) == ("mpi", ["gradients go over plain MPI: stale on b"])


def test_a_horovod_that_was_up_is_not_shut_down(monkeypatch):
    stopped = []
    monkeypatch.setattr(wire.horovod, "stop_horovod", lambda framework, timeout_s: stopped.append(framework))
    for found in (True, False):
        wires = wire.Wires(Config(), "torch", None, None, TWO, (CPU, CPU))
        wires._open, wires._found_horovod = {"horovod": SimpleNamespace(), "mpi": SimpleNamespace()}, found
        for name in ("mpi", "horovod", "horovod", "shared"):
            wires.give_back(name)
        assert stopped == ([] if found else ["torch"]) and list(wires._open) == ["mpi"]
