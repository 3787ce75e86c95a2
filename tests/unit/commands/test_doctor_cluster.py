"""doctor --cluster: facts of this host, ports of other hosts, and the checks on made-up hosts."""

import json
import os
import socket

import pytest

from hvdtrain.commands.doctor import cluster_checks, cluster_facts
from hvdtrain.commands.doctor.cli import main, rows
from hvdtrain.commands.doctor.facts import NOTE, SLOWS, STOPS

GIB = 1 << 30
HEALTHY = {"srun": ["none", "pmi2", "pmix", "pmix_v4"], "pmi": ["pmix"], "infiniband": [], "ports": [],
           "ntp": {"synchronized": True, "error_s": 0.002},
           "huge_pages": {"transparent": "madvise", "reserved_bytes": 0, "free_bytes": 0, "total_bytes": 16 * GIB},
           "limits": {"open files": 65536, "processes": None, "locked memory": None}}
LIMITS = HEALTHY["limits"]
GPU = {"driver": "550.54", "cuda": "12.4", "devices": [{"name": "A100"}] * 4}


def host(name="a", gpu=None, **changes):
    return {"host": name, "gpu": gpu, "cluster": HEALTHY | changes}


def test_healthy_hosts_have_no_problem():
    assert cluster_checks.diagnose([host("a", GPU), host("b", GPU), {"host": "c", "gpu": GPU, "cluster": None}]) == []
    unknown = dict.fromkeys(HEALTHY, "unknown: OSError: no")
    assert cluster_checks.diagnose([host(**unknown)]) == []


@pytest.mark.parametrize("changes, severity, got, do", [
    ({"srun": ["none", "pmi2"]}, STOPS, "srun has the PMI types none, pmi2", "mpirun inside the allocation"),
    ({"ntp": {"synchronized": False, "error_s": 16.0}}, NOTE, "no NTP program", "chronyd"),
    ({"ntp": {"synchronized": True, "error_s": 0.5}}, NOTE, "by 0.50 s", "chronyc sources"),
    ({"huge_pages": HEALTHY["huge_pages"] | {"free_bytes": 4 * GIB}}, SLOWS, "4.00 GiB of memory", "vm.nr_hugepages=0"),
    ({"huge_pages": HEALTHY["huge_pages"] | {"transparent": "never"}}, NOTE, "transparent huge pages", "echo madvise"),
    ({"limits": LIMITS | {"open files": 1024}}, NOTE, "may open 1,024 files", "ulimit -n 65536"),
    ({"limits": LIMITS | {"processes": 100}}, SLOWS, "may run 100 threads", "ulimit -u 65536"),
    ({"limits": LIMITS | {"locked memory": 8 << 20}, "infiniband": ["mlx5_0"]}, STOPS,
     "8.00 MiB with InfiniBand (mlx5_0)", "memlock unlimited"),
    ({"ports": [{"host": "b", "address": "10.0.0.2", "why": "no answer within 3 s"}]}, STOPS,
     "a cannot connect to a free port of b (10.0.0.2): no answer within 3 s", "on b allow"),
])
def test_each_problem_has_its_fix(changes, severity, got, do):
    problem, = cluster_checks.diagnose([host(**changes), host("b")])
    assert problem.severity == severity and got in problem.got and do in problem.do


def test_gpus_and_drivers_side_by_side():
    other = GPU | {"driver": "535.1", "devices": GPU["devices"][:2]}
    drivers, numbers = cluster_checks.diagnose([host("a", GPU), host("b", other), host("c")])
    assert drivers.severity == SLOWS and "550.54 on a; 535.1 on b" in drivers.got
    assert "4 on a; 2 on b; 0 on c" in numbers.got and "-H HOST:GPUS" in numbers.do


def test_ports_that_answer_refuse_and_do_not_answer():
    listener = cluster_facts.OpenPort()
    taken = socket.socket()
    taken.bind(("127.0.0.1", 0))
    full = socket.socket()
    full.bind(("127.0.0.1", 0))
    full.listen(0)
    waiting = [socket.socket() for _ in range(4)]  # a full queue drops packets, as a firewall does
    try:
        for one in waiting:
            one.setblocking(False)
            one.connect_ex(full.getsockname())
        to = [("a", "127.0.0.1", listener.number), ("b", "127.0.0.1", taken.getsockname()[1]),
              ("c", "127.0.0.1", full.getsockname()[1])]
        failed = {row["host"]: row["why"] for row in cluster_facts.connect(to, 0.3)}
        assert failed == {"b": os.strerror(111), "c": "no answer within 0.3 s"}
        assert cluster_facts.connect([]) == []
    finally:
        for one in (listener, taken, full, *waiting):
            one.close()
    offers = [("b", 5, [("10.0.0.2", "10.0.0.0/24"), ("172.17.0.1", "172.17.0.0/16")])]
    assert cluster_facts.targets(["10.0.0.0/24"], offers) == [("b", "10.0.0.2", 5)]


@pytest.fixture
def tools(tmp_path, monkeypatch):
    """Put an srun on PATH that answers as Slurm 22.05, on its error output."""
    tool = tmp_path / "srun"
    tool.write_text("#!/bin/sh\necho 'MPI plugin types are...\n\tnone\n\tcray_shasta\n\tpmi2\n\tpmix\n"
                    "specific pmix plugin versions available: pmix_v4' >&2\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")


def test_this_host(tools, tmp_path):
    found = cluster_facts.find(os.environ)
    assert found["srun"] == ["cray_shasta", "none", "pmi2", "pmix", "pmix_v4"] and found["pmi"][0] in ("pmix", "pmi2")
    assert set(found["ntp"]) == {"synchronized", "error_s"} and found["ntp"]["error_s"] >= 0
    assert found["huge_pages"]["total_bytes"] > GIB // 4 and found["limits"]["open files"]
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "meminfo").write_text("MemTotal: 4 kB\nHugePages_Total: 3\nHugePages_Free: 2\n"
                                               "Hugepagesize: 2048 kB\n")
    assert cluster_facts.huge_pages(str(tmp_path)) == {
        "transparent": "", "reserved_bytes": 6 << 20, "free_bytes": 4 << 20, "total_bytes": 4096}


def test_the_table_and_json(monkeypatch, capsys):
    from hvdtrain.commands.doctor import facts
    from hvdtrain.commands.doctor.cli import _SHOWN

    plain = dict.fromkeys((key for _, key, *_ in _SHOWN), None)
    plain |= {"host": "a", "slots": 1, "ranks": [0], "cluster": None}
    low = HEALTHY | {"limits": LIMITS | {"open files": 1024}}
    shown = dict(rows([plain | {"cluster": HEALTHY}, plain | {"host": "b", "cluster": low}]))
    assert shown["NTP"] == "synchronized, error at most 2 ms" and "b: open files 1024" in shown["user limits"]
    assert "NTP" not in dict(rows([plain])) and "blocked" not in shown
    monkeypatch.setattr(facts, "collect", lambda env: {**plain, "torch": {"version": "2"}, "interfaces": []})
    monkeypatch.setattr(cluster_facts, "find", lambda env: low)
    monkeypatch.setattr("hvdtrain.commands.doctor.cli.diagnose", lambda hosts: [])
    assert main(["--cluster", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["hosts"][0]["cluster"]["srun"] == HEALTHY["srun"] and "1,024" in report["problems"][0]["got"]
